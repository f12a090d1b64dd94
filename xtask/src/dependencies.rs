//! Whether docs/design/dependencies.md is true: a row for each direct dependency and no other, and the number
//! of packages that the program is built from.

use std::collections::BTreeSet;

use crate::packages::Packages;

const PAGE: &str = "docs/design/dependencies.md";

/// What the page lacks or says wrongly.
pub(crate) fn complaints() -> anyhow::Result<Vec<String>> {
    let packages = Packages::load("x86_64")?;
    let page = std::fs::read_to_string(PAGE)?;
    let count = packages.closure(packages.member("codex")?).len();
    Ok(check(&page, &packages.direct(), count))
}

fn check(page: &str, direct: &BTreeSet<String>, count: usize) -> Vec<String> {
    let rows: BTreeSet<_> = rows(page).collect();
    let missing = direct.iter().filter(|name| !rows.contains(name.as_str()));
    let missing = missing.map(|name| format!("{PAGE}: no row says why `{name}` is there"));
    let stale = rows.iter().filter(|name| !direct.contains(**name));
    let stale = stale.map(|name| format!("{PAGE}: `{name}` is no direct dependency"));
    let sentence = format!("built from {count} packages");
    let counted =
        (!page.contains(&sentence)).then(|| format!("{PAGE} does not say \"{sentence}\""));
    missing.chain(stale).chain(counted).collect()
}

/// The crates in the first column of the tables.
fn rows(page: &str) -> impl Iterator<Item = &str> {
    let cells = page.lines().filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
    cells.flat_map(|cell| cell.split(['`', ',', ' ']).filter(|name| !name.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_direct_dependencies_have_to_agree() {
        let page = "built from 3 packages\n\n| crate | for |\n| --- | --- |\n| `a`, `b-c` | `x` |\n| `d` | |\n";
        let direct = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        assert_eq!(check(page, &direct(&["a", "b-c", "d"]), 3), Vec::<String>::new());
        assert_eq!(check(page, &direct(&["a", "b-c", "d", "x"]), 3).len(), 1);
        assert_eq!(check(page, &direct(&["a", "d"]), 3).len(), 1);
        assert_eq!(check(page, &direct(&["a", "b-c", "d"]), 4).len(), 1);
    }
}
