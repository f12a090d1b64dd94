//! Makes docs/compatibility.md of interop/compatibility.toml. The interop suite proves the data; tidy proves
//! that the page is fresh.

use std::fmt::Write;

use anyhow::{Context, bail, ensure};
use toml::{Table, Value};

const DATA: &str = "interop/compatibility.toml";
const PAGE: &str = "docs/compatibility.md";

/// The kinds of rows, and the titles of their tables.
const KINDS: [(&str, &str); 6] = [
    ("flag", "Flags of `codex exec-server`"),
    ("variable", "Environment variables"),
    ("method", "Methods"),
    ("capability", "Capabilities"),
    ("member", "Members of the server's information"),
    ("file", "Files"),
];

/// The ratings, and whether they need a note.
const RATINGS: [(&str, bool); 4] =
    [("same", false), ("better", true), ("partial", true), ("absent", true)];

pub(crate) fn run() -> anyhow::Result<()> {
    std::fs::write(PAGE, fresh_page()?).context(PAGE)
}

/// Whether the page is not what the data makes of it.
pub(crate) fn complaint() -> anyhow::Result<Option<String>> {
    let fresh = fresh_page()?;
    let is_fresh = std::fs::read_to_string(PAGE).is_ok_and(|page| page == fresh);
    Ok((!is_fresh).then(|| format!("{PAGE} is stale; run cargo xtask compatibility")))
}

fn fresh_page() -> anyhow::Result<String> {
    page(&std::fs::read_to_string(DATA).context(DATA)?)
}

fn page(data: &str) -> anyhow::Result<String> {
    let data: Table = data.parse().context(DATA)?;
    let release =
        data.get("release").and_then(Value::as_str).context("the data has no `release`")?;
    for name in data.keys().filter(|name| *name != "release") {
        ensure!(KINDS.iter().any(|(kind, _)| kind == name), "unknown table `{name}`");
    }
    let mut page = format!(
        "# Compatibility\n\n\
         What release {release} of the other implementation has, and what this one does about it. The\n\
         [extensions](PROTOCOL.md) of this one are not listed.\n\n\
         *same*: a client or a service file sees no difference. *better*: the note says how. *partial*: the note\n\
         says what is missing. *absent*: the note says why.\n\n\
         Made of `{DATA}` by `cargo xtask compatibility`. `interop/run` compares that file with both programs, and\n\
         fails if a newer release has something that is not in it.\n"
    );
    for (kind, title) in KINDS {
        let rows =
            data.get(kind).and_then(Value::as_table).with_context(|| format!("no `{kind}`"))?;
        write!(page, "\n## {title}\n\n| theirs | ours | |\n| --- | --- | --- |\n")?;
        for (name, row) in rows {
            let text = |member: &str| row.get(member).and_then(Value::as_str);
            let ours = text("ours").with_context(|| format!("`{name}` has no `ours`"))?;
            let note = text("note").unwrap_or_default();
            match RATINGS.iter().find(|(rating, _)| *rating == ours) {
                Some((_, true)) if note.is_empty() => bail!("`{name}` is {ours} and has no note"),
                Some(_) => {}
                None => bail!("`{name}` is `{ours}`, which is no rating"),
            }
            let names: Vec<_> = name.split(", ").map(|name| format!("`{name}`")).collect();
            writeln!(page, "| {} | {ours} | {note} |", names.join(", "))?;
        }
    }
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(flag: &str) -> String {
        let others = "[variable]\n[method]\n[capability]\n[member]\n[file]\n";
        format!("release = \"1.2.3\"\n[flag]\n{flag}\n{others}")
    }

    #[test]
    fn each_row_is_a_line_of_the_page() {
        let page = page(&data("\"--a, --b\" = { ours = \"better\", note = \"faster\" }")).unwrap();
        assert!(page.contains("| `--a`, `--b` | better | faster |\n"), "{page}");
        assert!(page.contains("release 1.2.3"));
    }

    #[test]
    fn incomplete_rows_are_refused() {
        for bad in [
            "\"--a\" = { note = \"x\" }",
            "\"--a\" = { ours = \"fine\" }",
            "\"--a\" = { ours = \"absent\" }",
            "\"--a\" = 1",
        ] {
            assert!(page(&data(bad)).is_err(), "{bad}");
        }
        assert!(page("release = \"1\"").is_err());
        assert!(page(&format!("{}\n[other]", data(""))).is_err());
    }
}
