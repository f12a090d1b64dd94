//! The packages of this workspace and those it is built from, as cargo resolves them.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, ensure};
use serde_json::Value;

use crate::codex;

/// What `cargo metadata` says. It resolves features for the whole workspace, so a package may be listed that
/// only another member switches on.
#[derive(Debug)]
pub(crate) struct Packages {
    packages: BTreeMap<String, Value>,
    /// The dependencies of a package by id, and whether only its tests need each.
    edges: BTreeMap<String, Vec<(String, bool)>>,
    members: BTreeSet<String>,
}

impl Packages {
    /// The packages that are built on Linux with this architecture.
    pub(crate) fn load(architecture: &str) -> anyhow::Result<Self> {
        let platform = format!("{architecture}-unknown-linux-gnu");
        let mut command = codex::cargo();
        command.args(["metadata", "--format-version=1", "--locked", "--offline"]);
        let output = command.args(["--filter-platform", &platform]).output()?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "cargo metadata failed: {stderr}");
        Self::parse(&serde_json::from_slice(&output.stdout)?)
    }

    fn parse(metadata: &Value) -> anyhow::Result<Self> {
        let list =
            |value: &Value| value.as_array().cloned().context("not what cargo metadata prints");
        let id = |value: &Value| value.as_str().map(str::to_owned).context("no package id");
        let mut packages = BTreeMap::new();
        for package in list(&metadata["packages"])? {
            packages.insert(id(&package["id"])?, package);
        }
        let mut edges = BTreeMap::new();
        for node in list(&metadata["resolve"]["nodes"])? {
            let mut to = Vec::new();
            for dependency in list(&node["deps"])? {
                let kinds = list(&dependency["dep_kinds"])?;
                let is_dev = |kind: &Value| kind["kind"] == "dev";
                let pkg = id(&dependency["pkg"])?;
                // An optional dependency that the tests name too: they switch it on.
                let for_tests =
                    kinds.iter().any(is_dev) && is_optional(&packages, &id(&node["id"])?, &pkg);
                to.push((pkg, for_tests || kinds.iter().all(is_dev)));
            }
            edges.insert(id(&node["id"])?, to);
        }
        let members = list(&metadata["workspace_members"])?;
        let members = members.iter().map(id).collect::<anyhow::Result<_>>()?;
        Ok(Self { packages, edges, members })
    }

    /// The id of this member of the workspace.
    pub(crate) fn member(&self, name: &str) -> anyhow::Result<&str> {
        let mut members = self.members.iter();
        let found = members.find(|id| self.packages[*id]["name"] == name);
        found.map(String::as_str).with_context(|| format!("no package `{name}`"))
    }

    pub(crate) fn get(&self, id: &str) -> &Value {
        self.packages.get(id).unwrap_or(&Value::Null)
    }

    /// The packages that this one is built from directly, without those of its tests.
    pub(crate) fn built_from(&self, id: &str) -> impl Iterator<Item = &str> {
        let edges = self.edges.get(id).into_iter().flatten();
        edges.filter(|(_, only_tests)| !only_tests).map(|(to, _)| to.as_str())
    }

    /// This package and all that it is built from.
    pub(crate) fn closure<'a>(&'a self, root: &'a str) -> BTreeSet<&'a str> {
        let (mut found, mut open) = (BTreeSet::new(), vec![root]);
        while let Some(id) = open.pop() {
            if found.insert(id) {
                open.extend(self.built_from(id));
            }
        }
        found
    }

    /// The names of all packages that a manifest of this workspace names and that are not its own.
    pub(crate) fn direct(&self) -> BTreeSet<String> {
        let manifests = self.members.iter().map(|id| self.get(id));
        let named = manifests.filter_map(|package| package["dependencies"].as_array()).flatten();
        let foreign = named.filter(|dependency| dependency["path"].is_null());
        foreign.filter_map(|dependency| Some(dependency["name"].as_str()?.to_owned())).collect()
    }
}

/// Whether this package needs that one with a feature only.
fn is_optional(packages: &BTreeMap<String, Value>, package: &str, dependency: &str) -> bool {
    let (Some(package), Some(dependency)) = (packages.get(package), packages.get(dependency))
    else {
        return false;
    };
    let mut named = package["dependencies"].as_array().into_iter().flatten();
    named.any(|named| named["name"] == dependency["name"] && named["optional"] == true)
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::json;

    use super::*;

    /// A program that is built from a library and tested with another.
    pub(crate) fn sample() -> Packages {
        let package = |name: &str, source: Option<&str>, path: Option<&str>| {
            json!({
                "id": format!("{name}-id"), "name": name, "version": "1.0.0", "license": "MIT",
                "source": source, "dependencies": [
                    {"name": "used", "path": null}, {"name": "ours", "path": path},
                ],
            })
        };
        let registry = Some("registry+https://github.com/rust-lang/crates.io-index");
        let depends = |on: &str, kind: Option<&str>| json!({"pkg": format!("{on}-id"), "dep_kinds": [{"kind": kind}]});
        Packages::parse(&json!({
            "packages": [
                package("program", None, Some("/x")), package("used", registry, None),
                package("tests", registry, None),
            ],
            "workspace_members": ["program-id"],
            "resolve": {"nodes": [
                {"id": "program-id", "deps": [depends("used", None), depends("tests", Some("dev"))]},
                {"id": "used-id", "deps": []}, {"id": "tests-id", "deps": []},
            ]},
        }))
        .unwrap()
    }

    #[test]
    fn packages_of_tests_are_not_in_the_program() {
        let packages = sample();
        let program = packages.member("program").unwrap();
        assert_eq!(Vec::from_iter(packages.closure(program)), ["program-id", "used-id"]);
        assert_eq!(Vec::from_iter(packages.direct()), ["used"]);
        assert!(packages.member("used").is_err());
    }
}
