//! Applies a patch: read the files, check every section, then write.

use std::fmt;

use codex_exec_server_protocol::PathUri;

use super::parse::{Patch, PatchSection};
use super::step::{Step, StepError, Work};
use super::tree::{Found, Operation, Tree};
use super::unified::FileDiff;
use super::{PatchError, lines, unified};
use crate::files::Files;

/// How a file changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PatchChangeKind {
    /// The file is new.
    Added,
    /// Its content changed.
    Modified,
    /// The file was deleted.
    Deleted,
}

/// One changed file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PatchChange {
    /// How the file changed.
    pub kind: PatchChangeKind,
    /// The path as written in the patch.
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

/// The files that a patch changed, in the order of the patch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PatchReport {
    /// The changed files.
    pub changes: Vec<PatchChange>,
}

impl fmt::Display for PatchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.changes.iter().try_for_each(|change| writeln!(f, "{change}"))
    }
}

impl Files {
    /// Applies a patch, under the sandbox policy if there is one. Resolves relative paths against `cwd`.
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
        let mut plan = Plan { files: self, tree: Tree::new(self, cwd), steps: Vec::new() };
        for section in &patch.sections {
            plan.section(section).await?;
        }
        let steps = plan.steps;
        for (at, step) in steps.iter().enumerate() {
            if let Err(StepError { cause, uncertain }) = step.execute(self).await {
                let changes = |steps: &[Step]| steps.iter().map(|s| s.change.clone()).collect();
                return Err(match (at, &uncertain) {
                    (0, None) => PatchError::Unchanged(cause),
                    _ => PatchError::Partial {
                        done: changes(&steps[..at]),
                        undone: changes(&steps[at..]),
                        uncertain: uncertain.map(Into::into),
                        cause,
                    },
                });
            }
        }
        Ok(PatchReport { changes: steps.into_iter().map(|step| step.change).collect() })
    }
}

/// The steps so far, and the files as those steps leave them.
struct Plan<'a> {
    files: &'a Files,
    tree: Tree<'a>,
    steps: Vec<Step>,
}

impl Plan<'_> {
    async fn section(&mut self, section: &PatchSection) -> Result<(), PatchError> {
        match section {
            PatchSection::Add { path, lines } => {
                let operation = Operation { verb: "add", path };
                let mut content = lines.join("\n").into_bytes();
                if !lines.is_empty() {
                    content.push(b'\n');
                }
                match self.tree.find(operation).await? {
                    (_, Some(found)) => self.write(path, &found, content),
                    (entry, None) => self.create(operation, entry, content, None)?,
                }
            }
            PatchSection::Delete { path } => {
                let found = self.existing(Operation { verb: "delete", path }).await?;
                self.remove(path, &found.entry);
            }
            PatchSection::Update { path, move_to, hunks } => {
                let found = self.existing(Operation { verb: "update", path }).await?;
                let old = &self.tree.object(found.object).content;
                let new = lines::update(path, old, hunks)?;
                match move_to {
                    None => self.write(path, &found, new),
                    Some(to) => self.rename(path, &found, to, new).await?,
                }
            }
            PatchSection::Diff(diff) => self.diff(diff).await?,
        }
        Ok(())
    }

    async fn diff(&mut self, diff: &FileDiff) -> Result<(), PatchError> {
        match (&diff.old, &diff.new) {
            (Some(path), new) => {
                let verb = if new.is_some() { "update" } else { "delete" };
                let operation = Operation { verb, path };
                let found = self.existing(operation).await?;
                let old = &self.tree.object(found.object).content;
                let content = unified::update(path, old, &diff.hunks)?;
                match new {
                    Some(to) if to != path => self.rename(path, &found, to, content).await?,
                    Some(_) => self.write(path, &found, content),
                    None if content.is_empty() => self.remove(path, &found.entry),
                    None => {
                        return Err(operation.refused("it has more content than the diff removes"));
                    }
                }
            }
            (None, Some(path)) => {
                let operation = Operation { verb: "add", path };
                let content = unified::update(path, b"", &diff.hunks)?;
                match self.tree.find(operation).await? {
                    (_, Some(_)) => return Err(operation.refused("there is a file already")),
                    (entry, None) => {
                        let mode = diff.mode.filter(|_| self.files.can_write_atomically());
                        self.create(operation, entry, content, mode)?;
                    }
                }
            }
            (None, None) => {}
        }
        Ok(())
    }

    async fn rename(
        &mut self,
        path: &str,
        from: &Found,
        to: &str,
        content: Vec<u8>,
    ) -> Result<(), PatchError> {
        let operation = Operation { verb: "move", path: to };
        let (entry, taken) = self.tree.find(operation).await?;
        if entry == from.entry {
            self.write(path, from, content);
            return Ok(());
        }
        match taken {
            // The target is a link to the moved file, and would lead nowhere once the file has moved. So
            // the moved file replaces the link.
            Some(other) if other.is_link() && other.real == from.real => {
                if !self.files.can_rename() {
                    let problem =
                        format!("it is a link to {path}, which this server cannot rename");
                    return Err(operation.refused(problem));
                }
                // A relative link changes its meaning in another directory.
                if from.is_link() && entry.join("..").ok() != from.entry.join("..").ok() {
                    let problem =
                        format!("{path} and it are links to one file; delete one of them");
                    return Err(operation.refused(problem));
                }
                self.write(to, from, content);
                self.tree.rename(from, &entry);
                let work = Work::Rename { to: entry };
                self.step(PatchChangeKind::Deleted, path, from.entry.clone(), work);
                return Ok(());
            }
            // Another name of the same file.
            Some(other) if other.object == from.object => self.write(to, &other, content),
            Some(_) => {
                let problem =
                    "there is a file already; delete it first, in the same patch if you like";
                return Err(operation.refused(problem));
            }
            None => {
                let object = self.tree.object(from.object);
                let mode = object.mode.filter(|_| self.files.can_write_atomically());
                // If the server cannot set the permissions of a new file, a copy keeps them; but it would
                // copy a link as a link.
                if mode.is_none() && !from.is_link() && !from.fresh {
                    let old = object.content.clone();
                    self.tree.create(operation, &entry, content.clone(), None)?;
                    let work = Work::CopyAndWrite { from: from.entry.clone(), old, content };
                    self.step(PatchChangeKind::Added, to, entry, work);
                } else {
                    self.create(operation, entry, content, mode)?;
                }
            }
        }
        self.remove(path, &from.entry);
        Ok(())
    }

    async fn existing(&mut self, operation: Operation<'_>) -> Result<Found, PatchError> {
        let (_, found) = self.tree.find(operation).await?;
        found.ok_or_else(|| operation.refused("there is no such file"))
    }

    /// Plans new content for an existing file.
    fn write(&mut self, path: &str, found: &Found, content: Vec<u8>) {
        // If the server does not identify files, an earlier step may have changed this one.
        let may_alias = self.steps.iter().any(|step| matches!(step.work, Work::Write { .. }));
        let object = self.tree.object(found.object);
        let old = std::mem::replace(&mut object.content, content.clone());
        let work = Work::Write {
            content,
            old: Some(old),
            mode: None,
            atomic: self.files.can_write_atomically() && !object.shared,
            verify_first: may_alias && !object.identified,
        };
        self.step(PatchChangeKind::Modified, path, found.real.clone(), work);
    }

    fn create(
        &mut self,
        operation: Operation<'_>,
        entry: PathUri,
        content: Vec<u8>,
        mode: Option<u32>,
    ) -> Result<(), PatchError> {
        self.tree.create(operation, &entry, content.clone(), mode)?;
        let atomic = self.files.can_write_atomically();
        let work = Work::Write { content, old: None, mode, atomic, verify_first: false };
        self.step(PatchChangeKind::Added, operation.path, entry, work);
        Ok(())
    }

    fn remove(&mut self, path: &str, entry: &PathUri) {
        self.tree.remove(entry);
        self.step(PatchChangeKind::Deleted, path, entry.clone(), Work::Remove);
    }

    fn step(&mut self, kind: PatchChangeKind, path: &str, target: PathUri, work: Work) {
        let change = PatchChange { kind, path: path.to_owned() };
        self.steps.push(Step { change, path: target, work });
    }
}
