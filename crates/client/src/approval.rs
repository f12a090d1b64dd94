//! Approval: if the sandbox denies a command something, ask, and run it again without the sandbox.

use std::future::Future;

use codex_exec_server_protocol::{NetworkPolicy, PermissionProfile, SandboxContext};

use crate::client::ExecServerClient;
use crate::error::ExecServerError;
use crate::process::{ExecCommand, ExitStatus, Output, Process};

/// The decision about a denied command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Approval {
    /// Run it again without the sandbox.
    Approved,
    /// Keep the first result.
    Refused,
}

/// A command that the sandbox denied something, for the decision about it.
#[derive(Debug)]
pub struct Denial<'a, R> {
    /// The command.
    pub command: &'a ExecCommand,
    /// Its exit status; [`ExitStatus::sandbox_denied`] is true.
    pub status: ExitStatus,
    /// The result of running it.
    pub result: &'a R,
}

impl ExecServerClient {
    /// Runs a sandboxed command. If the sandbox probably caused its failure, calls `ask`, and if approved
    /// runs the command again without the sandbox.
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

    /// Like [`run_with_approval`](Self::run_with_approval), with the output as it arrives: `drive` runs
    /// the process, or both, to its end, and `status` returns the exit status of its result.
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
        // A process without a sandbox is not denied by one, even if the server says so.
        if !ended.sandbox_denied || command.sandbox.is_none() {
            return Ok(first);
        }
        let denial = Denial { command: &command, status: ended, result: &first };
        match ask(denial).await {
            Approval::Refused => Ok(first),
            Approval::Approved => {
                let mut again = command;
                // Without the sandbox, but not without the network that was asked for.
                let network_alone = || {
                    SandboxContext::new(PermissionProfile::External {
                        network: NetworkPolicy::Restricted,
                    })
                };
                again.sandbox = again.enforce_managed_network.then(network_alone);
                // The server keeps the first process's id for a while.
                again.process_id = None;
                drive(self.spawn(again).await?).await
            }
        }
    }
}
