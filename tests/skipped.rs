//! A test that cannot run here says so, and fails where every test has to run.

/// Says why a test, or a part of one, does not run.
///
/// # Panics
/// In CI, where nothing may be left out.
pub(crate) fn skipped(why: &str) {
    assert!(std::env::var_os("CI").is_none(), "skipped in CI: {why}");
    eprintln!("skipped: {why}");
}

/// Whether the tests run as root. Where they do not, what needs it is skipped.
pub(crate) fn runs_as_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skipped("only root can do this");
    }
    root
}
