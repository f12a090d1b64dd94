//! `codex cp`: copies files and trees to, from and within the server.

use std::ffi::{OsStr, OsString};
use std::io::IsTerminal;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use codex_exec_server::PathUri;
use codex_exec_server::client::{Files, TransferOptions, TransferReport};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::cat;
use crate::exit::{self, print_stderr};
use crate::input::Input;
use crate::on::{ConnectOptions, Connected, OnArgs, block_on};
use crate::remote_path;
use crate::signals::Signals;

/// Copy files to, from or within the server
///
/// Paths on the server start with a colon. A copy replaces its destination only when it is complete.
/// A new file gets the permissions of its source (without set-id and sticky bits, and on this machine
/// without those of the umask); an existing file keeps its permissions and owner.
#[derive(Debug, Args)]
#[command(
    override_usage = "codex cp [OPTIONS] <SOURCE>... <DESTINATION>",
    after_help = "\
Examples:
  codex cp notes.txt :/srv/app/            upload into /srv/app
  codex cp :/srv/app/result.tar .          download into this directory
  codex cp -r src :app                     upload a tree into the server's working directory
  codex cp :~/a :~/b                       copy within the server
  tar c src | codex cp - :src.tar          upload stdin
  codex cp :src.tar - | tar t              print to stdout, as codex cat does; ./- is a file named -

cp follows links to files, at the destination too. With -r it skips links to directories, broken
links, pipes, sockets and devices, prints what it skipped, copies the rest and exits with 1, as it
does if a file cannot be read or changes while it is copied. cp refuses to write to a pipe, a socket
or a device; write to - instead. A download writes nothing outside its destination: it does not
follow links below it that lead out."
)]
pub(crate) struct CpArgs {
    #[command(flatten)]
    on: OnArgs,

    /// Copy directories and their contents
    #[arg(short, long)]
    recursive: bool,

    /// Do not show progress
    #[arg(short, long)]
    quiet: bool,

    /// Files to copy, then the destination; paths on the server start with a colon, - is stdin or
    /// stdout
    #[arg(required = true, num_args = 2.., value_names = ["SOURCE", "DESTINATION"])]
    paths: Vec<OsString>,
}

/// One end of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Endpoint {
    Local(PathBuf),
    Remote(String),
    /// Stdin as a source, stdout as the destination.
    Stream,
}

impl Endpoint {
    fn parse(text: &OsStr) -> anyhow::Result<Self> {
        match text.as_bytes().strip_prefix(b":") {
            None if text == "-" => Ok(Self::Stream),
            None => Ok(Self::Local(text.into())),
            Some(path) => {
                let path = std::str::from_utf8(path).context(
                    "a path on the server must be UTF-8; write one with other bytes as a file: URI",
                )?;
                Ok(Self::Remote(if path.is_empty() { "." } else { path }.to_owned()))
            }
        }
    }
}

pub(crate) fn run(args: &CpArgs) -> anyhow::Result<ExitCode> {
    let Some((destination, sources)) = args.paths.split_last() else {
        bail!("expected at least one source and a destination");
    };
    let destination = Endpoint::parse(destination)?;
    let sources =
        sources.iter().map(|text| Endpoint::parse(text)).collect::<Result<Vec<_>, _>>()?;
    let is_local = |end: &Endpoint| !matches!(end, Endpoint::Remote(_));
    if sources.iter().filter(|source| **source == Endpoint::Stream).count() > 1 {
        bail!("stdin can be copied only once; name - one time");
    }
    if is_local(&destination) && sources.iter().any(is_local) {
        bail!(
            "none of these paths is on the server; start paths on the server with a colon: codex cp \
             FILE :/tmp/"
        );
    }
    block_on(async {
        let signals = Signals::listen()?;
        let connected = tokio::select! {
            connected = args.on.connect(ConnectOptions::default()) => connected?,
            code = signals.exit_code() => return Ok(exit::status(code)),
        };
        let copy = Copy { args, connected: &connected, files: connected.client.files() };
        let result = tokio::select! {
            result = copy.copy_all(&sources, &destination) => result.map(|complete| match complete {
                true => ExitCode::SUCCESS,
                false => ExitCode::FAILURE,
            }),
            code = signals.exit_code() => {
                print_stderr(format_args!("interrupted; no incomplete file was left at the destination"));
                Ok(exit::status(code))
            }
        };
        connected.close().await;
        result
    })
}

struct Copy<'a> {
    args: &'a CpArgs,
    connected: &'a Connected,
    files: Files,
}

impl Copy<'_> {
    /// Copies every source; whether all could be copied.
    async fn copy_all(&self, sources: &[Endpoint], destination: &Endpoint) -> anyhow::Result<bool> {
        let into = self.is_directory(destination).await?;
        if sources.len() > 1 && !into && *destination != Endpoint::Stream {
            bail!(
                "the destination of several files must be an existing directory; create it first"
            );
        }
        let mut complete = true;
        for source in sources {
            complete &= match (source, destination) {
                (Endpoint::Local(from), Endpoint::Remote(to)) => {
                    self.upload(from, to, into).await?
                }
                (Endpoint::Remote(from), Endpoint::Local(to)) => {
                    self.download(from, to, into).await?
                }
                (Endpoint::Remote(from), Endpoint::Remote(to)) => {
                    self.within(from, to, into).await?
                }
                (Endpoint::Stream, Endpoint::Remote(to)) => {
                    self.upload_stdin(to, into).await?;
                    true
                }
                (Endpoint::Remote(from), Endpoint::Stream) => {
                    self.print(from).await?;
                    true
                }
                (from, Endpoint::Local(_) | Endpoint::Stream) => {
                    let shown = match from {
                        Endpoint::Local(path) => path.display().to_string(),
                        _ => "stdin".to_owned(),
                    };
                    bail!("{shown} and the destination are both local; use cp or cat")
                }
            };
        }
        Ok(complete)
    }

    /// Whether the destination is a directory to copy into.
    async fn is_directory(&self, destination: &Endpoint) -> anyhow::Result<bool> {
        let (is, shown, slash) = match destination {
            Endpoint::Stream => return Ok(false),
            Endpoint::Local(path) => (
                path.is_dir(),
                path.display().to_string(),
                path.as_os_str().as_bytes().ends_with(b"/"),
            ),
            Endpoint::Remote(text) => {
                let path = remote_path::resolve(self.connected, text)?;
                let is = match self.files.metadata(&path).await {
                    Ok(metadata) => metadata.is_directory,
                    Err(error) if error.is_not_found() => false,
                    Err(error) => return Err(error.into()),
                };
                (is, format!(":{text}"), text.ends_with('/'))
            }
        };
        if slash && !is && !self.args.recursive {
            bail!("{shown} is not a directory; create it first, or drop the trailing slash");
        }
        Ok(is)
    }

    async fn upload(&self, from: &Path, to: &str, into: bool) -> anyhow::Result<bool> {
        let metadata =
            std::fs::metadata(from).with_context(|| format!("cannot read {}", from.display()))?;
        self.check(metadata.is_dir(), &from.display().to_string())?;
        let mut to = remote_path::resolve(self.connected, to)?;
        if into {
            let absolute = from.canonicalize()?;
            let name = absolute.file_name().context(
                "cannot copy / into a directory; name a destination that does not exist yet",
            )?;
            to = to.join(name.as_bytes())?;
        }
        let (bar, options) = self.progress(&from.display().to_string());
        let result = self.files.upload(from, &to, &options).await;
        bar.finish_and_clear();
        let report = result.with_context(|| format!("cannot copy {}", from.display()))?;
        Ok(print_incomplete(&report))
    }

    async fn upload_stdin(&self, to: &str, into: bool) -> anyhow::Result<()> {
        if into {
            bail!(":{to} is a directory; name the file to write stdin to, such as :{}", below(to));
        }
        let path = remote_path::resolve(self.connected, to)?;
        let upload = async {
            let mut input = Input::start()?;
            let mut writer = self.files.create_atomic(&path).await?;
            let (bar, _) = self.progress("stdin");
            while let Some(chunk) = input.next().await.context("cannot read stdin")? {
                bar.inc_length(chunk.len() as u64);
                bar.inc(chunk.len() as u64);
                writer.write_bytes(chunk).await?;
            }
            writer.finish().await?;
            bar.finish_and_clear();
            anyhow::Ok(())
        };
        upload.await.with_context(|| format!("cannot copy stdin to :{to}"))
    }

    /// Writes a file to stdout.
    async fn print(&self, from: &str) -> anyhow::Result<()> {
        let path = remote_path::resolve(self.connected, from)?;
        let print = async {
            if self.files.metadata(&path).await?.is_directory {
                bail!("it is a directory, and stdout takes files only");
            }
            cat::print(&self.files, &path, &mut tokio::io::stdout()).await
        };
        print.await.with_context(|| format!("cannot copy :{from}"))
    }

    async fn download(&self, from: &str, to: &Path, into: bool) -> anyhow::Result<bool> {
        let path = remote_path::resolve(self.connected, from)?;
        self.check_remote(&path, from).await?;
        let mut to = to.to_owned();
        if into {
            to.push(OsStr::from_bytes(written_name(from, &path)?));
        }
        let (bar, options) = self.progress(&format!(":{from}"));
        let result = self.files.download(&path, &to, &options).await;
        bar.finish_and_clear();
        let report = result.with_context(|| format!("cannot copy :{from}"))?;
        Ok(print_incomplete(&report))
    }

    async fn within(&self, from: &str, to: &str, into: bool) -> anyhow::Result<bool> {
        let source = remote_path::resolve(self.connected, from)?;
        self.check_remote(&source, from).await?;
        let mut to = remote_path::resolve(self.connected, to)?;
        if into {
            to = to.join(name_of(&source)?)?;
        }
        let (bar, options) = self.progress(&format!(":{from}"));
        let result = self.files.copy_within(&source, &to, &options).await;
        bar.finish_and_clear();
        let report = result.with_context(|| format!("cannot copy :{from}"))?;
        Ok(print_incomplete(&report))
    }

    async fn check_remote(&self, path: &PathUri, written: &str) -> anyhow::Result<()> {
        let metadata =
            self.files.metadata(path).await.with_context(|| format!("cannot read :{written}"))?;
        self.check(metadata.is_directory, &format!(":{written}"))
    }

    fn check(&self, is_directory: bool, shown: &str) -> anyhow::Result<()> {
        if is_directory && !self.args.recursive {
            bail!("{shown} is a directory; add -r to copy it and its contents");
        }
        Ok(())
    }

    /// A progress bar if stderr is a terminal.
    fn progress(&self, shown: &str) -> (ProgressBar, TransferOptions) {
        let mut options = TransferOptions::default();
        options.recursive = self.args.recursive;
        if self.args.quiet || !std::io::stderr().is_terminal() {
            return (ProgressBar::hidden(), options);
        }
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        let template = "{msg}  {wide_bar} {bytes}/{total_bytes}  {bytes_per_sec}  {eta} left";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("━━─"));
        }
        let shown = crate::style::printable(shown);
        bar.set_message(shown.clone());
        let updated = bar.clone();
        let options = options.on_progress(move |at| {
            updated.set_length(at.total_bytes);
            updated.set_position(at.bytes);
            if at.total_files > 1 {
                updated.set_message(format!("{shown}: {}/{} files", at.files, at.total_files));
            }
        });
        (bar, options)
    }
}

fn name_of(path: &PathUri) -> anyhow::Result<&[u8]> {
    match path.file_name() {
        b"" => {
            bail!("cannot copy :/ into a directory; name a destination that does not exist yet")
        }
        name => Ok(name),
    }
}

/// The local name of a download: the last name that the user wrote. The server decides what `.`, `..` and
/// `~` are, so those name nothing here.
fn written_name<'a>(written: &'a str, path: &'a PathUri) -> anyhow::Result<&'a [u8]> {
    if written.starts_with("file:") || written.bytes().all(|byte| byte == b'/') {
        return name_of(path);
    }
    match written.split('/').rfind(|name| !name.is_empty()) {
        Some("." | ".." | "~") | None => bail!(
            "`:{written}` has no name of its own, and the server should not choose one; name the copy, \
             such as ./copy"
        ),
        Some(name) => Ok(name.as_bytes()),
    }
}

/// A name in a directory of the server, as an example.
fn below(directory: &str) -> String {
    format!("{}/stdin", directory.trim_end_matches('/'))
}

/// Prints what was skipped and what failed; true if everything was copied.
fn print_incomplete(report: &TransferReport) -> bool {
    for skipped in &report.skipped {
        print_stderr(format_args!("skipped {}", crate::style::printable(skipped)));
    }
    for failed in &report.failed {
        print_stderr(format_args!("not copied: {}", crate::style::printable(failed)));
    }
    report.failed.is_empty() && report.skipped.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_with_a_leading_colon_are_on_the_server() {
        let parse = |text: &str| Endpoint::parse(OsStr::new(text)).unwrap();
        assert_eq!(parse("a:b"), Endpoint::Local("a:b".into()));
        assert_eq!(parse(":a"), Endpoint::Remote("a".into()));
        assert_eq!(parse(":"), Endpoint::Remote(".".into()));
        assert_eq!(parse("-"), Endpoint::Stream);
        assert_eq!(parse("./-"), Endpoint::Local("./-".into()));
        assert_eq!(parse(":-"), Endpoint::Remote("-".into()));
    }

    #[test]
    fn the_server_does_not_choose_the_name_of_a_download() {
        let path: PathUri = "/home/me/.ssh".parse().unwrap();
        for (written, name) in [("a", "a"), ("~/x/", "x"), ("/a/b//", "b"), ("../c", "c")] {
            assert_eq!(written_name(written, &path).unwrap(), name.as_bytes());
        }
        assert_eq!(written_name("file:///home/me/.ssh", &path).unwrap(), b".ssh");
        for written in [".", "..", "~", "~/", "./", "a/..", "a/."] {
            written_name(written, &path).unwrap_err();
        }
    }
}
