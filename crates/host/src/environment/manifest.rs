//! What a plugin's manifest says.

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::discovery::CapabilityFile;
use serde_json::{Map, Value};

/// Where a manifest is below its plugin's root, the preferred place first.
pub(super) const PLACES: [&str; 3] =
    [".codex-plugin/plugin.json", ".claude-plugin/plugin.json", ".cursor-plugin/plugin.json"];

/// Where a plugin's MCP servers or apps are described.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Described {
    /// In this file below the root, which the manifest names.
    Named(String),
    /// In the file that is meant if the manifest names none.
    Default,
    /// In the manifest itself, like this.
    Inline(String),
}

/// The two kinds of things that a manifest refers to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Member {
    pub name: &'static str,
    /// The file if the manifest names none.
    pub default: &'static str,
}

pub(super) const MCP_SERVERS: Member = Member { name: "mcpServers", default: ".mcp.json" };
pub(super) const APPS: Member = Member { name: "apps", default: ".app.json" };

/// Where a manifest says that they are; a warning if it says something unusable.
pub(super) fn described(
    manifest: &CapabilityFile,
    member: Member,
) -> (Option<Described>, Option<String>) {
    let default = Some(Described::Default);
    let Ok(value) = serde_json::from_str::<Value>(&manifest.contents) else {
        return (None, None);
    };
    match value.get(member.name) {
        Some(servers @ Value::Object(_)) if member.name == MCP_SERVERS.name => {
            (Some(Described::Inline(servers.to_string())), None)
        }
        Some(Value::String(path)) => match below_root(path) {
            Ok(path) => (Some(Described::Named(path)), None),
            Err(reason) => {
                let Member { name, .. } = member;
                let warning = format!("ignoring {name} in {}: {reason}", manifest.path);
                (default, Some(warning))
            }
        },
        _ => (default, None),
    }
}

/// A path that cannot lead out of the root.
fn below_root(path: &str) -> Result<String, &'static str> {
    let below = path.strip_prefix("./").ok_or("path must start with `./`")?;
    let names: Vec<&str> = below.split('/').filter(|name| !matches!(*name, "" | ".")).collect();
    match names.is_empty() || names.contains(&"..") || below.contains('\0') {
        true => Err("path must remain below the capability root"),
        false => Ok(names.join("/")),
    }
}

/// The root of the plugin whose manifest is at this path.
pub(super) fn plugin_root(manifest: &PathUri) -> Option<PathUri> {
    manifest.join("../..").ok()
}

/// What a plugin is called.
#[derive(Debug)]
pub(super) struct Names {
    /// Before the colon in the names of its skills.
    pub namespace: String,
    pub display_name: String,
}

/// The names that a valid manifest gives; a plugin without a name has that of its directory.
pub(super) fn names(manifest: &CapabilityFile) -> Option<Names> {
    let members: Map<String, Value> = serde_json::from_str(&manifest.contents).ok()?;
    text(&members, APPS.name)?;
    let display_name = match members.get("interface") {
        None | Some(Value::Null) => None,
        Some(Value::Object(interface)) => text(interface, "displayName")?,
        Some(_) => return None,
    };
    let directory = || {
        let root = plugin_root(&manifest.path)?;
        Some(String::from_utf8_lossy(root.file_name()).into_owned())
    };
    let named = text(&members, "name")?.filter(|name| !name.trim().is_empty());
    let namespace = named.map(str::to_owned).or_else(directory)?;
    let display_name = display_name.map(str::trim).filter(|name| !name.is_empty());
    Some(Names { display_name: display_name.unwrap_or(&namespace).to_owned(), namespace })
}

/// A member that is text or is not there; `None` if it is something else.
fn text<'m>(members: &'m Map<String, Value>, name: &str) -> Option<Option<&'m str>> {
    match members.get(name) {
        None | Some(Value::Null) => Some(None),
        Some(Value::String(text)) => Some(Some(text)),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_of_a_manifest_stays_below_its_root() {
        for (path, below) in [
            ("./m.json", Some("m.json")),
            ("././a//m.json", Some("a/m.json")),
            ("./", None),
            ("./.", None),
            ("./a/../m.json", None),
            ("../m.json", None),
            ("m.json", None),
            ("/m.json", None),
            ("./a\0b", None),
            ("", None),
        ] {
            assert_eq!(below_root(path).ok().as_deref(), below, "{path:?}");
        }
    }
}
