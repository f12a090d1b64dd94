//! A patch against the files of a server: read, check everything, then write.

use std::collections::{HashMap, HashSet};
use std::fmt;

use codex_exec_server_protocol::PathUri;

use super::parse::{Patch, PatchSection};
use super::step::{Failed, Step, Work};
use super::{PatchError, lines};
use crate::error::ExecServerError;
use crate::files::Files;

/// What happened to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PatchChangeKind {
    /// It is new.
    Added,
    /// Its content changed.
    Modified,
    /// It is gone.
    Deleted,
}

/// One changed file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PatchChange {
    /// How it changed.
    pub kind: PatchChangeKind,
    /// As the patch says it.
    pub path: String,
}

/// As git prints it: `M src/main.rs`.
impl fmt::Display for PatchChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = match self.kind {
            PatchChangeKind::Added => 'A',
            PatchChangeKind::Modified => 'M',
            PatchChangeKind::Deleted => 'D',
        };
        write!(f, "{letter} {}", self.path)
    }
}

/// Every file that a patch changed, in the order of the patch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PatchReport {
    /// The files.
    pub changes: Vec<PatchChange>,
}

impl fmt::Display for PatchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.changes.iter().try_for_each(|change| writeln!(f, "{change}"))
    }
}

impl Files {
    /// Applies a patch; its relative paths are relative to `cwd`. Held to the sandbox of these
    /// files, if they have one.
    ///
    /// ```no_run
    /// # async fn run(client: codex_exec_client::ExecServerClient) -> Result<(), Box<dyn std::error::Error>> {
    /// use codex_exec_client::Patch;
    /// let patch = Patch::parse("*** Begin Patch\n*** Add File: a.txt\n+hello\n*** End Patch")?;
    /// let report = client.files().apply_patch(&patch, &"/srv/app".parse()?).await?;
    /// assert_eq!(report.to_string(), "A a.txt\n");
    /// # Ok(()) }
    /// ```
    pub async fn apply_patch(
        &self,
        patch: &Patch,
        cwd: &PathUri,
    ) -> Result<PatchReport, PatchError> {
        let mut plan = Plan {
            files: self,
            cwd,
            known: HashMap::new(),
            shared: HashSet::new(),
            steps: Vec::new(),
        };
        for section in &patch.sections {
            plan.section(section).await?;
        }
        let steps = plan.steps;
        for (at, step) in steps.iter().enumerate() {
            if let Err(Failed { cause, left }) = step.take(self).await {
                let changes = |steps: &[Step]| steps.iter().map(|s| s.change.clone()).collect();
                return Err(match (at, &left) {
                    (0, None) => PatchError::Unchanged(cause),
                    _ => PatchError::Partial {
                        done: changes(&steps[..at]),
                        undone: changes(&steps[at..]),
                        left: left.map(Into::into),
                        cause,
                    },
                });
            }
        }
        Ok(PatchReport { changes: steps.into_iter().map(|step| step.change).collect() })
    }
}

/// What will be there once the steps so far are done.
struct Plan<'a> {
    files: &'a Files,
    cwd: &'a PathUri,
    known: HashMap<PathUri, Option<Vec<u8>>>,
    /// Files that have, or may have, other names; those are written through.
    shared: HashSet<PathUri>,
    steps: Vec<Step>,
}

impl Plan<'_> {
    async fn section(&mut self, section: &PatchSection) -> Result<(), PatchError> {
        match section {
            PatchSection::Add { path, lines } => {
                let mut content = lines.join("\n").into_bytes();
                if !lines.is_empty() {
                    content.push(b'\n');
                }
                let place = self.resolve(path)?;
                let old = self.content("add", path, &place).await?;
                let kind = match old {
                    Some(_) => PatchChangeKind::Modified,
                    None => PatchChangeKind::Added,
                };
                let work = self.write(&place, content, old);
                self.step(kind, path, place, work);
            }
            PatchSection::Delete { path } => {
                let place = self.resolve(path)?;
                self.existing("delete", path, &place).await?;
                self.step(PatchChangeKind::Deleted, path, place, Work::Remove);
            }
            PatchSection::Update { path, move_to, hunks } => {
                let place = self.resolve(path)?;
                let old = self.existing("update", path, &place).await?;
                let new = lines::update(path, &old, hunks)?;
                let target = match move_to {
                    Some(to) => Some((to, self.resolve(to)?)).filter(|(_, to)| *to != place),
                    None => None,
                };
                match target {
                    None => {
                        let work = self.write(&place, new, Some(old));
                        self.step(PatchChangeKind::Modified, path, place, work);
                    }
                    Some((to, destination)) => {
                        self.rename(path, (place, old), to, destination, new).await?;
                    }
                }
            }
        }
        Ok(())
    }

    async fn rename(
        &mut self,
        path: &str,
        (place, old): (PathUri, Vec<u8>),
        to: &str,
        destination: PathUri,
        content: Vec<u8>,
    ) -> Result<(), PatchError> {
        let taken = self.content("move", to, &destination).await?;
        // A copy keeps the permissions; but a link would be copied as a link.
        let plain = match self.files.metadata(&place).await {
            Ok(metadata) => !metadata.is_symlink,
            Err(error) if error.is_not_found() => false,
            Err(error) => return Err(PatchError::Unchanged(error)),
        };
        let (kind, work) = if taken.is_some() {
            (PatchChangeKind::Modified, self.write(&destination, content, taken))
        } else if plain {
            let from = place.clone();
            (PatchChangeKind::Added, Work::CopyAndWrite { from, old, content })
        } else {
            (PatchChangeKind::Added, self.write(&destination, content, None))
        };
        self.step(kind, to, destination, work);
        self.step(PatchChangeKind::Deleted, path, place, Work::Remove);
        Ok(())
    }

    fn resolve(&self, path: &str) -> Result<PathUri, PatchError> {
        let resolved = if path.starts_with('/') || path.starts_with("file:") {
            path.parse()
        } else {
            self.cwd.join(path)
        };
        resolved.map_err(|error| PatchError::Path(error.to_string()))
    }

    /// The content of a file as the steps so far leave it; `None` if there is none.
    async fn content(
        &mut self,
        verb: &'static str,
        path: &str,
        place: &PathUri,
    ) -> Result<Option<Vec<u8>>, PatchError> {
        if let Some(known) = self.known.get(place) {
            return Ok(known.clone());
        }
        let target = |problem: String| PatchError::Target { verb, path: path.to_owned(), problem };
        match self.files.metadata(place).await {
            Ok(metadata) if metadata.is_file => {
                if metadata.nlink != Some(1) {
                    self.shared.insert(place.clone());
                }
            }
            Ok(metadata) if metadata.is_directory => {
                return Err(target("it is a directory".to_owned()));
            }
            Ok(_) => return Err(target("it is not a regular file".to_owned())),
            Err(error) if error.is_not_found() => return Ok(None),
            Err(ExecServerError::Server { message, .. }) => return Err(target(message)),
            Err(error) => return Err(PatchError::Unchanged(error)),
        }
        match self.files.read_file(place).await {
            Ok(content) => Ok(Some(content.to_vec())),
            Err(ExecServerError::Server { message, .. }) => Err(target(message)),
            Err(error) => Err(PatchError::Unchanged(error)),
        }
    }

    async fn existing(
        &mut self,
        verb: &'static str,
        path: &str,
        place: &PathUri,
    ) -> Result<Vec<u8>, PatchError> {
        self.content(verb, path, place).await?.ok_or_else(|| PatchError::Target {
            verb,
            path: path.to_owned(),
            problem: "there is no such file".to_owned(),
        })
    }

    fn write(&self, place: &PathUri, content: Vec<u8>, old: Option<Vec<u8>>) -> Work {
        let atomic = self.files.can_write_atomically() && !self.shared.contains(place);
        Work::Write { content, old, atomic }
    }

    fn step(&mut self, kind: PatchChangeKind, path: &str, place: PathUri, work: Work) {
        let after = match &work {
            Work::Write { content, .. } | Work::CopyAndWrite { content, .. } => {
                Some(content.clone())
            }
            Work::Remove => None,
        };
        self.known.insert(place.clone(), after);
        let change = PatchChange { kind, path: path.to_owned() };
        self.steps.push(Step { change, path: place, work });
    }
}
