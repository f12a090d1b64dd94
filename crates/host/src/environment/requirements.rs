//! What the older managed configuration requires: what it sets is all that is allowed.

use toml::{Table, Value};

use super::document::{Document, DocumentError};

/// The requirements that follow from a managed configuration.
pub(super) fn of_managed(document: &Document) -> Result<Table, DocumentError> {
    let mut required = Table::new();
    let table = &document.table;
    if let Some(policy) = table.get("approval_policy") {
        required.insert("allowed_approval_policies".into(), list([approval(document, policy)?]));
    }
    if let Some(reviewer) = table.get("approvals_reviewer") {
        let names = ["user", "auto_review"];
        let reviewer = one_of(document, "approvals_reviewer", reviewer, &names)?;
        // Where a model may review, the user may, too.
        let allowed = match reviewer {
            "user" => list(["user"]),
            other => list([other, "user"]),
        };
        required.insert("allowed_approvals_reviewers".into(), allowed);
    }
    if let Some(mode) = table.get("sandbox_mode") {
        let names = ["read-only", "workspace-write", "danger-full-access"];
        // The strictest is always allowed.
        let allowed = match one_of(document, "sandbox_mode", mode, &names)? {
            "read-only" => list(["read-only"]),
            other => list(["read-only", other]),
        };
        required.insert("allowed_sandbox_modes".into(), allowed);
    }
    Ok(required)
}

fn list<V: Into<Value>>(values: impl IntoIterator<Item = V>) -> Value {
    Value::Array(values.into_iter().map(Into::into).collect())
}

fn one_of<'v>(
    document: &Document,
    key: &str,
    value: &'v Value,
    names: &[&str],
) -> Result<&'v str, DocumentError> {
    value.as_str().filter(|name| names.contains(name)).ok_or_else(|| {
        document.value_error(format!("{key} must be one of `{}`", names.join("`, `")))
    })
}

fn approval(document: &Document, policy: &Value) -> Result<Value, DocumentError> {
    let granular = policy.as_table().filter(|table| table.len() == 1);
    if let Some(Value::Table(asks)) = granular.and_then(|table| table.get("granular")) {
        return granular_approval(document, asks);
    }
    let names = ["untrusted", "on-failure", "on-request", "never"];
    Ok(match one_of(document, "approval_policy", policy, &names)? {
        // The older name.
        "on-failure" => "on-request".into(),
        other => other.into(),
    })
}

/// Which questions are asked, each of them said.
fn granular_approval(document: &Document, asks: &Table) -> Result<Value, DocumentError> {
    let mut all = Table::new();
    for (name, default) in [
        ("sandbox_approval", None),
        ("rules", None),
        ("skill_approval", Some(false)),
        ("request_permissions", Some(false)),
        ("mcp_elicitations", None),
    ] {
        let asked = match asks.get(name) {
            None => default,
            Some(value) => value.as_bool(),
        };
        let asked = asked.ok_or_else(|| {
            document.value_error(format!("approval_policy.granular.{name} must be true or false"))
        })?;
        all.insert(name.into(), asked.into());
    }
    let mut policy = Table::new();
    policy.insert("granular".into(), all.into());
    Ok(policy.into())
}
