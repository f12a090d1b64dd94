//! The software bill of materials of the program: a CycloneDX document, made from what cargo resolves and
//! `Cargo.lock`. The same commit gives the same bytes.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use serde_json::{Value, json};

use crate::packages::Packages;

/// Where the document goes.
#[derive(Debug, Args)]
pub(crate) struct SbomArgs {
    /// The file to write
    #[arg(long, default_value = "target/codex.cdx.json")]
    output: PathBuf,
}

pub(crate) fn run(args: &SbomArgs) -> anyhow::Result<()> {
    let packages = Packages::load(std::env::consts::ARCH)?;
    let text = json_text(&packages)?;
    if let Some(directory) = args.output.parent() {
        std::fs::create_dir_all(directory)?;
    }
    std::fs::write(&args.output, text)
        .with_context(|| format!("cannot write {}", args.output.display()))?;
    eprintln!("{}", args.output.display());
    Ok(())
}

/// The document of the program.
pub(crate) fn json_text(packages: &Packages) -> anyhow::Result<String> {
    let lock = std::fs::read_to_string("Cargo.lock")?;
    let document = document(packages, "codex", &checksums(&lock)?)?;
    Ok(serde_json::to_string_pretty(&document)? + "\n")
}

/// SHA-256 digests of the packages of registries, by name and version.
fn checksums(lock: &str) -> anyhow::Result<BTreeMap<(String, String), String>> {
    let lock: toml::Table = lock.parse()?;
    let packages = lock.get("package").and_then(toml::Value::as_array);
    let packages = packages.context("Cargo.lock has no packages")?.iter();
    let text = |package: &toml::Value, key: &str| Some(package.get(key)?.as_str()?.to_owned());
    let entry = |package: &toml::Value| {
        Some(((text(package, "name")?, text(package, "version")?), text(package, "checksum")?))
    };
    Ok(packages.filter_map(entry).collect())
}

fn document(
    packages: &Packages,
    program: &str,
    checksums: &BTreeMap<(String, String), String>,
) -> anyhow::Result<Value> {
    let root = packages.member(program)?;
    let ids = packages.closure(root);
    let reference = |id: &str| {
        let package = packages.get(id);
        format!("pkg:cargo/{}@{}", text(package, "name"), text(package, "version"))
    };
    let component = |id: &str| {
        let package = packages.get(id);
        let (name, version) = (text(package, "name"), text(package, "version"));
        let mut component = json!({
            "type": if id == root { "application" } else { "library" },
            "bom-ref": reference(id),
            "name": name,
            "version": version,
            "purl": reference(id),
        });
        if let Some(license) = package["license"].as_str() {
            // Older manifests write `/` for OR, which is not SPDX.
            let expression = license.replace(" / ", " OR ").replace('/', " OR ");
            component["licenses"] = json!([{ "expression": expression }]);
        }
        if let Some(digest) = checksums.get(&(name.to_owned(), version.to_owned())) {
            component["hashes"] = json!([{ "alg": "SHA-256", "content": digest }]);
        }
        component
    };
    let depends = |id: &&str| {
        let mut on: Vec<_> = packages.built_from(id).map(reference).collect();
        on.sort();
        json!({ "ref": reference(id), "dependsOn": on })
    };
    let libraries = ids.iter().filter(|id| **id != root);
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": component(root) },
        "components": libraries.map(|id| component(id)).collect::<Vec<_>>(),
        "dependencies": ids.iter().map(depends).collect::<Vec<_>>(),
    }))
}

fn text<'a>(package: &'a Value, key: &str) -> &'a str {
    package[key].as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packages::tests::sample;

    #[test]
    fn document_names_what_the_program_is_built_from() {
        let lock = "[[package]]\nname = \"used\"\nversion = \"1.0.0\"\nchecksum = \"ab\"\n";
        let document = document(&sample(), "program", &checksums(lock).unwrap()).unwrap();
        assert_eq!(document["metadata"]["component"]["type"], "application");
        let [used] = &document["components"].as_array().unwrap()[..] else { panic!("{document}") };
        assert_eq!(used["purl"], "pkg:cargo/used@1.0.0");
        assert_eq!(used["hashes"][0]["content"], "ab");
        assert_eq!(used["licenses"][0]["expression"], "MIT");
        assert_eq!(document["dependencies"][0]["dependsOn"][0], used["bom-ref"]);
    }

    /// Every package of the program comes from the registry with its digest, or is ours.
    #[test]
    fn every_component_of_this_program_is_identified() {
        let lock = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.lock"));
        let checksums = checksums(&lock.unwrap()).unwrap();
        let document =
            document(&Packages::load(std::env::consts::ARCH).unwrap(), "codex", &checksums)
                .unwrap();
        for component in document["components"].as_array().unwrap() {
            let ours = component["name"].as_str().unwrap().starts_with("codex-");
            assert!(ours || component["hashes"].is_array(), "{component}");
            assert!(component["licenses"].is_array(), "{component}");
        }
    }
}
