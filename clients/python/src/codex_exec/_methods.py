"""Which requests may be sent again after a lost connection.

Only the effect counts: a request that changes nothing, or whose repetition changes nothing further. A caller
that knows more (a handle that outlives the connection, ``force`` of a removal) says so for its request.
"""

from __future__ import annotations

REPEATABLE = frozenset(
    {
        "process/read",
        "process/terminate",
        "process/resize",
        "process/screen",
        "process/list",
        "session/list",
        "network/updateRules",
        "environment/info",
        "environment/status",
        "environmentConfig/read",
        "capabilityRoots/discoverV1",
        "capabilities/discoverV2",
        "fs/readFile",
        "fs/writeFile",
        "fs/getMetadata",
        "fs/canonicalize",
        "fs/readDirectory",
        "fs/walk",
        "fs/glob",
        "fs/search",
        "fs/cancelSearch",
        "fs/setMode",
        "fs/unwatch",
    }
)
