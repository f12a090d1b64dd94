//! Crate boundaries: packages that each crate must not depend on, directly or indirectly. They follow the
//! last column of the table in ARCHITECTURE.md, and what features leave out.

use anyhow::{Context, ensure};

use crate::codex;

/// A package with its features, and the packages that it must not depend on.
struct Boundary {
    package: &'static str,
    /// `None`: the default features.
    features: Option<&'static str>,
    without: &'static [&'static str],
}

const fn boundary(package: &'static str, without: &'static [&'static str]) -> Boundary {
    Boundary { package, features: None, without }
}

const fn with_features(
    package: &'static str,
    features: &'static str,
    without: &'static [&'static str],
) -> Boundary {
    Boundary { package, features: Some(features), without }
}

const HOST: &str = "codex-exec-host";
const SANDBOX: &str = "codex-linux-sandbox";
const CLIENT: &str = "codex-exec-client";
const REMOTE: &str = "codex-exec-remote";
const CREDENTIALS: &str = "codex-exec-credentials";
const SERVING: &str = "codex-exec-serving";
// Noise, the boxes of sign-in, NATS.
const NOISE: &str = "clatter";
const CRYPTO_BOX: &str = "crypto_box";
const NATS: &str = "async-nats";

const BOUNDARIES: &[Boundary] = &[
    boundary("codex-exec-server-protocol", &["tokio", "hyper"]),
    boundary("codex-exec-relay-core", &["tokio", "serde_json"]),
    boundary("codex-exec-screen", &["tokio", "serde_json"]),
    boundary("codex-exec-rpc", &[HOST, SANDBOX, "hyper"]),
    boundary(SANDBOX, &["tokio"]),
    boundary(
        "codex-exec-network",
        &["codex-exec-server-protocol", "codex-exec-rpc", HOST, SANDBOX],
    ),
    boundary(HOST, &["codex-exec-rpc", "hyper"]),
    boundary(CLIENT, &[HOST, SANDBOX, CREDENTIALS, SERVING]),
    boundary("codex-exec-mcp", &[HOST, SANDBOX, CREDENTIALS, SERVING]),
    boundary(SERVING, &[CLIENT]),
    boundary(REMOTE, &[HOST, SANDBOX, CLIENT, SERVING, CREDENTIALS, CRYPTO_BOX]),
    boundary(CREDENTIALS, &[HOST, SANDBOX, CLIENT, SERVING]),
    boundary("codex-rendezvous", &[HOST, SANDBOX, CLIENT, SERVING, CREDENTIALS]),
    boundary("codex-exec-server", &[NATS]),
    with_features(
        "codex-exec-server",
        "server",
        &[NOISE, CRYPTO_BOX, NATS, CLIENT, REMOTE, CREDENTIALS],
    ),
    with_features("codex-exec-server", "client", &[NOISE, CRYPTO_BOX, NATS, HOST, SANDBOX, REMOTE]),
    with_features(
        "codex-exec-server",
        "client,server",
        &[NOISE, CRYPTO_BOX, NATS, REMOTE, CREDENTIALS],
    ),
];

/// Every dependency that crosses a boundary.
pub(crate) fn complaints() -> anyhow::Result<Vec<String>> {
    let mut complaints = Vec::new();
    for boundary in BOUNDARIES {
        let tree = tree(boundary)?;
        let of =
            boundary.features.map(|names| format!(" with `{names}` alone")).unwrap_or_default();
        for found in found(&tree, boundary.without) {
            let package = boundary.package;
            complaints.push(format!("{package}{of}: must not depend on {found}"));
        }
    }
    Ok(complaints)
}

/// The packages that are built, one per line; the first word is the name.
fn tree(boundary: &Boundary) -> anyhow::Result<String> {
    let mut tree = codex::cargo();
    tree.args(["tree", "--locked", "--offline", "--prefix=none", "--edges=normal"]);
    tree.args(["--package", boundary.package]);
    if let Some(features) = boundary.features {
        tree.args(["--no-default-features", "--features", features]);
    }
    let output = tree.output().context("cargo tree")?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "cargo tree of {} failed: {stderr}", boundary.package);
    Ok(String::from_utf8(output.stdout)?)
}

fn found<'a>(tree: &str, names: &'a [&'a str]) -> Vec<&'a str> {
    let is_in = |name: &&str| tree.lines().any(|line| line.split(' ').next() == Some(name));
    names.iter().copied().filter(is_in).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn package_names_match_whole_words() {
        let tree = "codex-exec-server v0.1.0 (/x)\ntokio-util v0.7.0\nhyper v1.0.0 (*)\n";
        assert_eq!(found(tree, &["tokio", "hyper", "codex-exec"]), ["hyper"]);
        assert_eq!(found("", &["tokio"]), Vec::<&str>::new());
    }

    #[test]
    fn every_forbidden_package_exists() {
        // A misspelt name would never be found, so each must name a package of the workspace's tree.
        let all = Boundary { package: "codex", features: None, without: &[] };
        let all = tree(&all).unwrap();
        for boundary in BOUNDARIES {
            let known = found(&all, boundary.without);
            assert_eq!(known, boundary.without, "{}", boundary.package);
        }
    }
}
