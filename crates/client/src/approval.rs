//! Denied by the sandbox → ask → approved → run again without it.

use std::future::Future;

use crate::client::ExecServerClient;
use crate::error::ExecServerError;
use crate::process::{ExecCommand, ExitStatus, Output, Process};

/// What whoever is asked decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Approval {
    /// Run it again, without the sandbox.
    Approved,
    /// The first result stands.
    Refused,
}

/// What whoever is asked is told.
#[derive(Debug)]
pub struct Denial<'a, R> {
    /// What was run.
    pub command: &'a ExecCommand,
    /// How it ended; [`ExitStatus::sandbox_denied`] is true.
    pub status: ExitStatus,
    /// What came of it.
    pub result: &'a R,
}

impl ExecServerClient {
    /// Runs a sandboxed command; if the sandbox probably caused its failure, asks; if approved, runs
    /// it again without the sandbox, else the first result stands.
    ///
    /// ```no_run
    /// # async fn run(client: codex_exec_client::ExecServerClient) -> Result<(), codex_exec_client::ExecServerError> {
    /// use codex_exec_client::{Approval, ExecCommand, PermissionProfile, SandboxContext};
    ///
    /// let command = ExecCommand::shell("echo hi > /srv/app/greeting")
    ///     .sandbox(SandboxContext::new(PermissionProfile::read_only()));
    /// let output = client
    ///     .run_with_approval(command, async |denial| {
    ///         eprintln!("{:?} was denied; run it without the sandbox?", denial.command.argv());
    ///         Approval::Approved
    ///     })
    ///     .await?;
    /// assert!(output.status.success());
    /// # Ok(()) }
    /// ```
    pub async fn run_with_approval(
        &self,
        command: ExecCommand,
        ask: impl AsyncFnOnce(Denial<'_, Output>) -> Approval,
    ) -> Result<Output, ExecServerError> {
        let drive = |process: Process| process.wait_with_output();
        self.drive_with_approval(command, drive, |output| output.status, ask).await
    }

    /// The same for a command whose output is wanted as it comes: `drive` takes each process to its
    /// end (the second if there is one), and `status` finds its exit status in what comes of that.
    pub async fn drive_with_approval<R, F>(
        &self,
        command: ExecCommand,
        mut drive: impl FnMut(Process) -> F,
        status: impl Fn(&R) -> ExitStatus,
        ask: impl AsyncFnOnce(Denial<'_, R>) -> Approval,
    ) -> Result<R, ExecServerError>
    where
        F: Future<Output = Result<R, ExecServerError>>,
    {
        let first = drive(self.spawn(command.clone()).await?).await?;
        let ended = status(&first);
        // A process without a sandbox is never denied by one, whatever the server says.
        if !ended.sandbox_denied || command.sandbox.is_none() {
            return Ok(first);
        }
        let denial = Denial { command: &command, status: ended, result: &first };
        match ask(denial).await {
            Approval::Refused => Ok(first),
            Approval::Approved => {
                let mut again = command;
                again.sandbox = None;
                // The first process is remembered by its id for a while.
                again.process_id = None;
                drive(self.spawn(again).await?).await
            }
        }
    }
}
