//! The licences of everything that is linked into the program, as their authors ask for.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context;
use serde_json::Value;

use crate::packages::Packages;

/// How the names of files with licences begin.
const NAMES: [&str; 6] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];

const PREFACE: &str = "\
codex is built from the packages below, each under the licence that its line names, and from the Rust standard
library (MIT OR Apache-2.0). A static program also contains the GNU C library (LGPL-2.1-or-later): to link another
version of it, build codex from its sources with that version. Each text follows the packages that come with it.
";

/// The packages with their licences, then each text once.
pub(crate) fn text(packages: &Packages) -> anyhow::Result<String> {
    let mut list = String::new();
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for id in packages.closure(packages.member("codex")?) {
        let package = packages.get(id);
        if package["source"].is_null() {
            continue;
        }
        let text = |key: &str| package[key].as_str().unwrap_or_default();
        let name = format!("{} {}", text("name"), text("version"));
        list.push_str(&format!("{name}: {}\n", text("license")));
        for text in files(package)? {
            texts.entry(text).or_default().push(name.clone());
        }
    }
    let mut page = format!("{PREFACE}\n{list}");
    for (text, packages) in &texts {
        let rule = "-".repeat(80);
        page.push_str(&format!("\n{rule}\n{}\n\n{}\n", packages.join(", "), text.trim_end()));
    }
    Ok(page)
}

/// The texts of licences in the directory of a package.
fn files(package: &Value) -> anyhow::Result<Vec<String>> {
    let manifest = package["manifest_path"].as_str().context("a package without a manifest")?;
    let directory = Path::new(manifest).parent().context("a manifest without a directory")?;
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().to_uppercase();
        if entry.file_type()?.is_file() && NAMES.iter().any(|start| name.starts_with(start)) {
            found.push(String::from_utf8_lossy(&std::fs::read(entry.path())?).into_owned());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_package_of_others_is_named_with_a_licence() {
        let packages = Packages::load(std::env::consts::ARCH).unwrap();
        let page = text(&packages).unwrap();
        let list = page.strip_prefix(PREFACE).unwrap().trim_start().split("\n\n").next().unwrap();
        assert!(list.lines().any(|line| line.starts_with("tokio 1.")), "{list}");
        assert!(list.lines().all(|line| !line.ends_with(": ")), "{list}");
        assert!(!list.contains("codex-"), "{list}");
        assert!(page.contains("Copyright (c) Tokio Contributors"), "the text of a licence");
    }
}
