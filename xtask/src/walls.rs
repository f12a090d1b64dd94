//! What each crate must not be built with, directly or by way of another: the last column of the table
//! in ARCHITECTURE.md, as far as a dependency can show it, and what features leave out.

use std::process::Command;

use anyhow::{Context, ensure};

/// A package as somebody depends on it, and what must not come with it.
struct Wall {
    package: &'static str,
    /// `None`: the default features.
    features: Option<&'static str>,
    without: &'static [&'static str],
}

const fn wall(package: &'static str, without: &'static [&'static str]) -> Wall {
    Wall { package, features: None, without }
}

const fn with(
    package: &'static str,
    features: &'static str,
    without: &'static [&'static str],
) -> Wall {
    Wall { package, features: Some(features), without }
}

const HOST: &str = "codex-exec-host";
const SANDBOX: &str = "codex-linux-sandbox";
const CLIENT: &str = "codex-exec-client";
const REMOTE: &str = "codex-exec-remote";
const CREDENTIALS: &str = "codex-exec-credentials";
const SERVING: &str = "codex-exec-serving";
// Noise, the boxes of sign-in, NATS.
const NOISE: &str = "clatter";
const BOXES: &str = "crypto_box";
const NATS: &str = "async-nats";

const WALLS: &[Wall] = &[
    wall("codex-exec-server-protocol", &["tokio", "hyper"]),
    wall("codex-exec-relay-core", &["tokio", "serde_json"]),
    wall("codex-exec-rpc", &[HOST, SANDBOX, "hyper"]),
    wall(SANDBOX, &["tokio"]),
    wall("codex-exec-network", &["codex-exec-server-protocol", "codex-exec-rpc", HOST, SANDBOX]),
    wall(HOST, &["codex-exec-rpc", "hyper"]),
    wall(CLIENT, &[HOST, SANDBOX, CREDENTIALS, SERVING]),
    wall(SERVING, &[CLIENT]),
    wall(REMOTE, &[HOST, SANDBOX, CLIENT, SERVING, CREDENTIALS, BOXES]),
    wall(CREDENTIALS, &[HOST, SANDBOX, CLIENT, SERVING]),
    wall("codex-rendezvous", &[HOST, SANDBOX, CLIENT, SERVING, CREDENTIALS]),
    wall("codex-exec-server", &[NATS]),
    with("codex-exec-server", "server", &[NOISE, BOXES, NATS, CLIENT, REMOTE, CREDENTIALS]),
    with("codex-exec-server", "client", &[NOISE, BOXES, NATS, HOST, SANDBOX, REMOTE]),
    with("codex-exec-server", "client,server", &[NOISE, BOXES, NATS, REMOTE, CREDENTIALS]),
];

/// Everything that is behind a wall it must not be behind.
pub fn complaints() -> anyhow::Result<Vec<String>> {
    let mut complaints = Vec::new();
    for wall in WALLS {
        let tree = tree(wall)?;
        let of = wall.features.map(|names| format!(" with `{names}` alone")).unwrap_or_default();
        for found in found(&tree, wall.without) {
            let package = wall.package;
            complaints.push(format!("{package}{of}: is built with {found}, and must not be"));
        }
    }
    Ok(complaints)
}

/// The packages that are built, one a line; the first word is the name.
fn tree(wall: &Wall) -> anyhow::Result<String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut tree = Command::new(cargo);
    tree.args(["tree", "--locked", "--offline", "--prefix=none", "--edges=normal"]);
    tree.args(["--package", wall.package]);
    if let Some(features) = wall.features {
        tree.args(["--no-default-features", "--features", features]);
    }
    let output = tree.output().context("cargo tree")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "cargo tree of {} failed: {said}", wall.package);
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
    fn names_are_compared_whole() {
        let tree = "codex-exec-server v0.1.0 (/x)\ntokio-util v0.7.0\nhyper v1.0.0 (*)\n";
        assert_eq!(found(tree, &["tokio", "hyper", "codex-exec"]), ["hyper"]);
        assert_eq!(found("", &["tokio"]), Vec::<&str>::new());
    }

    #[test]
    fn a_wall_has_another_side() {
        // A name that is misspelt would never be found: each is that of a package somewhere.
        let all = Wall { package: "codex", features: None, without: &[] };
        let all = tree(&all).unwrap();
        for wall in WALLS {
            let known = found(&all, wall.without);
            assert_eq!(known, wall.without, "{}", wall.package);
        }
    }
}
