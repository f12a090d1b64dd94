//! The Debian package: an `ar` archive with the version of its format, control data and a tree.

use anyhow::ensure;

use super::contents::read;
use super::tree::Tree;
use super::{PACKAGE, VERSION};

/// The environment of the rendezvous, with its secrets.
const RENDEZVOUS_SETTINGS: &str = "etc/codex-rendezvous.env";

/// The scripts that dpkg runs.
const SCRIPTS: [&str; 3] = ["postinst", "prerm", "postrm"];

/// The name of the package's file.
pub(crate) fn file_name() -> String {
    format!("{PACKAGE}_{VERSION}_{}.deb", architecture())
}

/// Makes the package of what is to be installed.
pub(crate) fn package(mut tree: Tree, epoch: u64) -> anyhow::Result<Vec<u8>> {
    tree.secret(RENDEZVOUS_SETTINGS, read("deploy/debian/codex-rendezvous.env")?);
    tree.file(&format!("usr/share/doc/{PACKAGE}/copyright"), read("deploy/debian/copyright")?);
    let mut control = Tree::default();
    control.file("control", control_text(tree.size()));
    control.file("conffiles", format!("/{RENDEZVOUS_SETTINGS}\n"));
    for script in SCRIPTS {
        control.program(script, read(&format!("deploy/debian/{script}"))?);
    }
    let mut archive = Vec::from(b"!<arch>\n");
    add_member(&mut archive, "debian-binary", epoch, b"2.0\n")?;
    add_member(&mut archive, "control.tar.gz", epoch, &control.to_tar_gz("./", epoch)?)?;
    add_member(&mut archive, "data.tar.gz", epoch, &tree.to_tar_gz("./", epoch)?)?;
    Ok(archive)
}

fn control_text(size: usize) -> String {
    let (architecture, kibibytes) = (architecture(), size.div_ceil(1024));
    format!(
        "Package: {PACKAGE}\n\
         Version: {VERSION}\n\
         Architecture: {architecture}\n\
         Maintainer: The codex exec-server authors <root@localhost>\n\
         Installed-Size: {kibibytes}\n\
         Recommends: ca-certificates\n\
         Section: net\n\
         Priority: optional\n\
         Description: run commands and work with files on another machine\n \
         One server process starts programs in pipes or terminals, streams their\n \
         output, reads and writes files, and holds each request to a sandbox policy.\n \
         Clients speak JSON-RPC over websockets, stdio or an end-to-end encrypted\n \
         relay. An independent implementation of the codex exec-server protocol.\n"
    )
}

/// Debian's name of this processor.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Appends a member to an `ar` archive: a header of 60 characters, then the bytes, an even number of them.
fn add_member(archive: &mut Vec<u8>, name: &str, epoch: u64, bytes: &[u8]) -> anyhow::Result<()> {
    let (owner, group, mode, size) = (0, 0, "100644", bytes.len());
    let header = format!("{name:<16}{epoch:<12}{owner:<6}{group:<6}{mode:<8}{size:<10}`\n");
    ensure!(header.len() == 60, "{name} does not fit into an ar archive");
    archive.extend(header.as_bytes());
    archive.extend(bytes);
    if bytes.len() % 2 == 1 {
        archive.push(b'\n');
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_have_headers_of_60_characters_and_even_lengths() {
        let mut archive = Vec::new();
        add_member(&mut archive, "a", 1, b"odd").unwrap();
        add_member(&mut archive, "debian-binary", 1_763_000_000, b"2.0\n").unwrap();
        assert_eq!(archive.len(), 60 + 4 + 60 + 4);
        assert_eq!(&archive[58..64], b"`\nodd\n");
        add_member(&mut archive, "a-name-that-is-too-long", 1, b"").unwrap_err();
    }
}
