//! The manual: a page for each command, from its arguments, kept in `docs/man`. Set `UPDATE_SNAPSHOTS` to write
//! the pages.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory};
use clap_mangen::Man;

/// The pages, by file name.
fn pages() -> BTreeMap<String, Vec<u8>> {
    let mut command = super::Cli::command().disable_help_subcommand(true);
    command.build();
    let mut pages = BTreeMap::new();
    add_pages(&command, "codex", &mut pages);
    pages
}

fn add_pages(command: &Command, name: &str, pages: &mut BTreeMap<String, Vec<u8>>) {
    let mut page = Vec::new();
    // Without a date: a page changes when its arguments do. Building has named the command as its page.
    Man::new(command.clone()).manual("codex").render(&mut page).unwrap();
    pages.insert(format!("{name}.1"), page);
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        add_pages(below, &format!("{name}-{}", below.get_name()), pages);
    }
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/man")
}

#[test]
fn manual_pages_match_the_arguments() {
    let (directory, pages) = (directory(), pages());
    let kept = || -> Vec<String> {
        let entries = std::fs::read_dir(&directory).into_iter().flatten();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        std::fs::create_dir_all(&directory).unwrap();
        for name in kept() {
            std::fs::remove_file(directory.join(name)).unwrap();
        }
        for (name, page) in &pages {
            std::fs::write(directory.join(name), page).unwrap();
        }
    }
    let mut names = kept();
    names.sort();
    assert_eq!(names, Vec::from_iter(pages.keys().cloned()), "UPDATE_SNAPSHOTS=1 accepts that");
    for (name, page) in &pages {
        let kept = std::fs::read_to_string(directory.join(name)).unwrap();
        let found = String::from_utf8_lossy(page);
        assert_eq!(found, kept, "{name} has changed; UPDATE_SNAPSHOTS=1 accepts that");
    }
}

#[test]
fn every_command_has_a_page_with_its_synopsis() {
    let pages = pages();
    for name in ["codex.1", "codex-run.1", "codex-exec-server.1", "codex-rendezvous-token-create.1"]
    {
        let page = String::from_utf8(pages[name].clone()).unwrap();
        assert!(page.contains(".SH NAME") && page.contains(".SH SYNOPSIS"), "{name}");
    }
}
