//! `codex cp`, `cat`, `ls`, `rm` and `search`.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::commands::{codex, everywhere, output, output_of, read};

fn write(path: &Path, text: &str) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

#[test]
fn cp_uploads_and_downloads_files() {
    everywhere(|codex| {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let there = |name: &str| format!(":{}", path(name).display());
        write(&path("a.txt"), "hello\n");
        std::fs::create_dir(path("into")).unwrap();
        let cp = |arguments: &[&str]| output(codex("cp").args(arguments).current_dir(&directory));
        assert_eq!(cp(&["a.txt", &there("b.txt")]).success(), "");
        assert_eq!(read(path("b.txt")), "hello\n");
        cp(&["a.txt", "b.txt", &there("into")]).success();
        assert_eq!(read(path("into/a.txt")), "hello\n");
        assert_eq!(read(path("into/b.txt")), "hello\n");
        cp(&[&there("b.txt"), "c.txt"]).success();
        assert_eq!(read(path("c.txt")), "hello\n");
        cp(&[&there("b.txt"), &there("d.txt")]).success();
        assert_eq!(read(path("d.txt")), "hello\n");

        cp(&["a.txt", "e.txt"]).failed(1, "start paths on the server with a colon");
        cp(&["none.txt", &there("e.txt")]).failed(1, "cannot read none.txt");
        cp(&[&there("none.txt"), "e.txt"]).failed(1, "none.txt");
        cp(&[&there("a.txt"), "/proc/e.txt"]).failed(1, "cannot write /proc/e.txt");
        cp(&["a.txt", ":/proc/e.txt"]).failed(1, "/proc/e.txt");
        cp(&["a.txt", &there("none/")]).failed(1, "not a directory");
        cp(&["into", &there("x")]).failed(1, "add -r");
        cp(&[&there("into"), "x"]).failed(1, "add -r");
        let names: Vec<_> = std::fs::read_dir(&directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.starts_with('.') || name == "e.txt" || name == "x")
            .collect();
        assert_eq!(names, [""; 0], "something half-written was left");
    });
}

#[test]
fn cp_keeps_programs_in_trees_executable() {
    everywhere(|codex| {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        write(&path("tree/deep/er/file"), "x");
        write(&path("tree/program"), "#!/bin/sh\n");
        let executable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(path("tree/program"), executable).unwrap();
        let there = format!(":{}", path("there").display());
        let cp = |arguments: &[&str]| output(codex("cp").args(arguments).current_dir(&directory));
        cp(&["-r", "tree", &there]).success();
        cp(&["-r", &there, "back"]).success();
        cp(&["-r", "tree", &there]).success();
        for copy in ["there", "back", "there/tree"] {
            assert_eq!(read(path(copy).join("deep/er/file")), "x");
            let mode = path(copy).join("program").metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o755);
        }
    });
}

#[test]
fn large_files_are_copied_whole() {
    everywhere(|codex| {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let content: Vec<u8> = (0..3u32 << 20).flat_map(u32::to_le_bytes).collect();
        std::fs::write(path("a"), &content).unwrap();
        let there = format!(":{}", path("b").display());
        let mut cp = codex("cp");
        output(cp.current_dir(&directory).args(["a", &there])).success();
        let mut cp = codex("cp");
        output(cp.current_dir(&directory).args([&there, "c"])).success();
        assert!(std::fs::read(path("c")).unwrap() == content);
        let cat = codex("cat").arg(path("b")).output().unwrap();
        assert!(cat.stdout == content);
    });
}

#[test]
fn ls_lists_and_rm_removes() {
    everywhere(|codex| {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        write(&path("d/file"), "12345");
        write(&path("d/.hidden"), "");
        write(&path("d/sub/x"), "");
        let ls = |arguments: &[&str]| output(codex("ls").args(arguments).arg(path("d")));
        assert_eq!(ls(&[]).success(), "file\nsub\n");
        assert_eq!(ls(&["-a"]).success(), ".hidden\nfile\nsub\n");
        let long = ls(&["-l"]).success();
        assert!(long.starts_with("-rw-"), "{long}");
        assert!(long.contains("     5  20"), "{long}");
        output(codex("ls").arg("/no/such")).failed(1, "cannot list /no/such");

        let rm = |arguments: &[&str]| output(codex("rm").args(arguments).current_dir("/"));
        let shown = |name: &str| path(name).display().to_string();
        rm(&[&shown("d")]).failed(1, "add -r");
        rm(&[&shown("none")]).failed(1, "cannot remove");
        rm(&["-f", &shown("none")]).success();
        rm(&["-rf", "/"]).failed(1, "the root directory");
        // Paths after an unset variable, and paths that `rm` refuses.
        rm(&["-rf", ""]).failed(1, "empty path");
        let here =
            [".", "..", "./", &format!("{}/.", shown("d")), &format!("{}/..", shown("d/sub"))];
        for here in here {
            rm(&["-rf", here]).failed(1, "write the directory's name");
        }
        assert!(path("d/file").exists());
        rm(&[&shown("d/file")]).success();
        rm(&["-r", &shown("d")]).failed(1, "add -f");
        assert!(path("d/sub/x").exists());
        rm(&["-rf", &format!(":{}", shown("d"))]).success();
        assert!(!path("d").exists());
        std::fs::create_dir(path("empty")).unwrap();
        rm(&["-r", &shown("empty")]).success();
    });
}

#[test]
fn search_prints_matching_lines() {
    everywhere(|codex| {
        let directory = tempfile::tempdir().unwrap();
        write(&directory.path().join("a.rs"), "fn main() {\n    hello();\n}\n");
        write(&directory.path().join("b.txt"), "Hello\n");
        let search =
            |arguments: &[&str]| output(codex("search").args(arguments).arg(directory.path()));
        let root = directory.path().display();
        assert_eq!(search(&["hello"]).success(), format!("{root}/a.rs:2:    hello();\n"));
        let both = search(&["-i", "HELLO"]).success();
        assert_eq!(both.lines().count(), 2, "{both}");
        assert_eq!(
            search(&["-i", "-g", "*.txt", "hello"]).success(),
            format!("{root}/b.txt:1:Hello\n")
        );
        assert_eq!(search(&["-F", "main("]).success(), format!("{root}/a.rs:1:fn main() {{\n"));
        assert_eq!(search(&["-l", "-i", "hello|main"]).success().lines().count(), 2);
        assert_eq!(search(&["-l", "main"]).success(), format!("{root}/a.rs\n"));
        assert_eq!(search(&["-l", "nothing"]).code, Some(1));
        let around = search(&["-C", "1", "hello"]).success();
        assert!(around.contains("a.rs-1-fn main"), "{around}");
        assert_eq!(search(&["nothing"]).code, Some(1));
        // An unreadable file may contain a match.
        output(codex("search").args(["nothing", "/proc/self/mem"])).failed(2, "/proc/self/mem");
        search(&["("]).failed(2, "pattern");
        search(&["--max", "1", "-i", "hello|fn"]).err.contains("stopped after");
    });
}

#[test]
fn a_closed_output_is_no_error_message() {
    let directory = tempfile::tempdir().unwrap();
    let large = directory.path().join("large");
    std::fs::write(&large, vec![b'x'; 8 << 20]).unwrap();
    for arguments in
        [vec!["cat", large.to_str().unwrap()], vec!["completion", "bash"], vec!["ls", "/usr/bin"]]
    {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let child =
            codex().args(&arguments).stdout(writer).stderr(std::process::Stdio::piped()).spawn();
        let output = child.unwrap().wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(141), "{arguments:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{arguments:?}");
    }
}

#[test]
fn input_from_a_pipe_is_copied_whole() {
    everywhere(|codex| {
        let directory = tempfile::tempdir().unwrap();
        let there = directory.path().join("there");
        // More than fits into one message.
        let content: Vec<u8> = (0..13u32 << 20).flat_map(u32::to_le_bytes).collect();
        let mut cp = codex("cp");
        cp.arg("/dev/stdin").arg(format!(":{}", there.display()));
        assert_eq!(output_of(&mut cp, &content).success(), "");
        assert!(std::fs::read(&there).unwrap() == content);
    });
}

#[test]
fn skipped_files_are_reported() {
    everywhere(|codex| {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        write(&path("tree/sub/file"), "x");
        std::os::unix::fs::symlink("sub", path("tree/link")).unwrap();
        std::os::unix::fs::symlink("nowhere", path("tree/dead")).unwrap();
        drop(std::os::unix::net::UnixListener::bind(path("tree/socket")).unwrap());
        let there = |name: &str| format!(":{}", path(name).display());
        let cp = |arguments: &[&str]| output(codex("cp").args(arguments).current_dir(&directory));
        let all = |up: &str, down: &str, within: &str| {
            [
                cp(&["-r", "tree", &there(up)]),
                cp(&["-r", &there("tree"), down]),
                cp(&["-r", &there("tree"), &there(within)]),
            ]
        };
        for said in all("up", "down", "within") {
            assert_eq!(said.code, Some(1), "{said:?}");
            for told in [
                "tree/link: a link to a directory",
                "tree/dead: a broken link",
                "tree/socket: not a regular file",
            ] {
                assert!(said.err.contains(told), "{said:?}");
            }
        }
        // A regular file that cannot be read.
        std::os::unix::fs::symlink("/proc/self/mem", path("tree/mem")).unwrap();
        for said in all("up2", "down2", "within2") {
            said.failed(1, "not copied: ");
            assert!(said.err.contains("tree/mem"), "{said:?}");
            assert!(!said.err.contains("code ") && !said.err.contains("fs/"), "{said:?}");
        }
        for copy in ["up", "down", "within", "up2", "down2", "within2"] {
            assert_eq!(read(path(copy).join("sub/file")), "x");
            assert_eq!(std::fs::read_dir(path(copy)).unwrap().count(), 1, "{copy}");
        }
    });
}

#[test]
fn a_copy_to_a_special_file_is_refused() {
    everywhere(|codex| {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        write(&path("a.txt"), "hello\n");
        drop(std::os::unix::net::UnixListener::bind(path("socket")).unwrap());
        std::os::unix::fs::symlink("socket", path("link")).unwrap();
        let there = |name: &str| format!(":{}", path(name).display());
        let here = |name: &str| path(name).display().to_string();
        for to in ["socket", "link"] {
            for (from, to) in [
                (here("a.txt"), there(to)),
                (there("a.txt"), here(to)),
                (there("a.txt"), there(to)),
            ] {
                output(codex("cp").args([&from, &to])).failed(1, "is a socket");
            }
        }
        let metadata = path("socket").symlink_metadata().unwrap();
        assert!(std::os::unix::fs::FileTypeExt::is_socket(&metadata.file_type()));
        assert!(path("link").is_symlink());
    });
}

#[test]
fn names_that_are_not_utf8_are_accepted_and_printed_unchanged() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    everywhere(|codex| {
        let directory = tempfile::tempdir().unwrap();
        let name = OsStr::from_bytes(b"caf\xe9\n");
        let path = directory.path().join(name);
        std::fs::write(&path, "found\n").unwrap();
        let bytes = |command: &mut std::process::Command| {
            let output = command.output().unwrap();
            assert!(output.status.success(), "{output:?}");
            output.stdout
        };
        assert_eq!(bytes(codex("cat").arg(&path)), b"found\n");
        assert_eq!(bytes(codex("ls").arg(directory.path())), b"caf\xe9\n\n");
        let long = bytes(codex("ls").arg("-l").arg(directory.path()));
        assert!(long.ends_with(b"  caf\xe9\n\n"), "{long:?}");
        assert_eq!(bytes(codex("ls").arg(&path)), [path.as_os_str().as_bytes(), b"\n"].concat());
        let found = bytes(codex("search").arg("found").arg(directory.path()));
        assert_eq!(found, [path.as_os_str().as_bytes(), b":1:found\n"].concat());
        bytes(codex("rm").arg(&path));
        assert!(!path.exists());
    });
}

/// `-` is stdin as a source and stdout as the destination; `./-` is a file.
#[test]
fn cp_reads_stdin_and_writes_stdout() {
    everywhere(|codex| {
        let directory = tempfile::tempdir().unwrap();
        let there = |name: &str| format!(":{}", directory.path().join(name).display());
        let cp = |arguments: &[&str], input: &[u8]| {
            output_of(codex("cp").args(arguments).current_dir(&directory), input)
        };
        let mut random = fastrand::Rng::with_seed(16);
        for len in [0, 1, 65_536, 300_000, 3 << 20] {
            let text: String = (0..len).map(|_| random.alphanumeric()).collect();
            assert_eq!(cp(&["-", &there("piped")], text.as_bytes()).success(), "");
            assert_eq!(read(directory.path().join("piped")), text);
            assert!(cp(&[&there("piped"), "-"], b"").success() == text);
        }
        write(&directory.path().join("small"), "two\n");
        write(&directory.path().join("first"), "one\n");
        assert_eq!(cp(&[&there("first"), &there("small"), "-"], b"").success(), "one\ntwo\n");
        cp(&["-", &there("")], b"x").failed(1, "name the file");
        cp(&["-", "-"], b"x").failed(1, "none of these paths is on the server");
        cp(&[&there(""), "-"], b"").failed(1, "stdout takes files only");
        cp(&["-", "-", &there("x")], b"").failed(1, "only once");
        assert!(!directory.path().join("-").exists());
        cp(&[&there("first"), "./-"], b"").success();
        assert_eq!(read(directory.path().join("-")), "one\n");
    });
}
