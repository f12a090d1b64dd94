//! Patches, which models write.

use codex_exec_client::{HunkLine, Patch, PatchSection};

use super::kind_of;

/// What was parsed is parsed again from its plainest text.
pub(super) fn check(bytes: &[u8]) -> u64 {
    let Ok(text) = std::str::from_utf8(bytes) else { return 0 };
    let patch = match Patch::parse(text) {
        Ok(patch) => patch,
        Err(error) => return kind_of(error),
    };
    // Which carriage returns belong to a line cannot be written plainly.
    let is_diff = patch.sections.iter().any(|section| matches!(section, PatchSection::Diff(_)));
    // A unified diff has no plainer text; that parsing it does not panic is the check.
    if !text.contains('\r') && !is_diff {
        let plain = plain(&patch);
        let again = Patch::parse(&plain).unwrap_or_else(|error| panic!("{error}: {plain:?}"));
        assert_eq!(again, patch, "{plain:?}");
    }
    patch.sections.iter().fold(1, |kind, section| (kind * 31 + kind_of(section)) % 1_000_003)
}

fn plain(patch: &Patch) -> String {
    let mut out = String::from("*** Begin Patch\n");
    let mut line = |text: String| {
        out.push_str(&text);
        out.push('\n');
    };
    for section in &patch.sections {
        match section {
            PatchSection::Add { path, lines } => {
                line(format!("*** Add File: {path}"));
                lines.iter().for_each(|added| line(format!("+{added}")));
            }
            PatchSection::Diff(_) => {}
            PatchSection::Delete { path } => line(format!("*** Delete File: {path}")),
            PatchSection::Update { path, move_to, hunks } => {
                line(format!("*** Update File: {path}"));
                if let Some(path) = move_to {
                    line(format!("*** Move to: {path}"));
                }
                for hunk in hunks {
                    if hunk.headers.is_empty() {
                        line("@@".to_owned());
                    }
                    hunk.headers.iter().for_each(|header| line(format!("@@ {header}")));
                    for changed in &hunk.lines {
                        line(match changed {
                            HunkLine::Context(text) => format!(" {text}"),
                            HunkLine::Remove(text) => format!("-{text}"),
                            HunkLine::Insert(text) => format!("+{text}"),
                        });
                    }
                    if hunk.at_end {
                        line("*** End of File".to_owned());
                    }
                }
            }
        }
    }
    out.push_str("*** End Patch\n");
    out
}
