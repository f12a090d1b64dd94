"""Sandbox policies, as the protocol spells them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Union

from ._errors import InvalidParamsError
from ._paths import to_uri

#: ``"read-only"``, ``"workspace-write"``, ``"full-access"``, or an object of the protocol: a whole ``sandbox``
#: (with ``permissions``), or its permissions alone (with ``type``).
Policy = Union[str, Mapping[str, Any], None]


def _special(kind: str, access: str) -> dict[str, Any]:
    return {"path": {"type": "special", "value": {"kind": kind}}, "access": access}


def _managed(*entries: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "managed",
        "file_system": {"type": "restricted", "entries": list(entries)},
        "network": "restricted",
    }


def permissions(name: str) -> dict[str, Any] | None:
    """The permissions of a named policy; ``None`` for no sandbox at all."""
    if name == "read-only":
        return _managed(_special("root", "read"))
    if name == "workspace-write":
        return _managed(
            _special("root", "read"),
            _special("project_roots", "write"),
            _special("slash_tmp", "write"),
            _special("tmpdir", "write"),
        )
    if name == "full-access":
        return None
    raise InvalidParamsError(
        f"unknown policy {name!r}: expected read-only, workspace-write, full-access, or an object of the protocol"
    )


def sandbox(policy: Policy, cwd: str) -> dict[str, Any] | None:
    """The ``sandbox`` member of a request, with ``cwd`` as its workspace unless the policy names one."""
    if policy is None:
        return None
    if isinstance(policy, str):
        granted = permissions(policy)
        if granted is None:
            return None
        context: dict[str, Any] = {"permissions": granted}
    elif "permissions" in policy:
        context = dict(policy)
    elif "type" in policy:
        context = {"permissions": dict(policy)}
    else:
        raise InvalidParamsError("a policy object needs the member `permissions`, or `type`")
    if "cwd" not in context:
        context["cwd"] = to_uri(cwd)
        context.setdefault("workspaceRoots", [to_uri(cwd)])
    return context
