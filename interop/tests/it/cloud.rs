//! Our own registry and rendezvous, for both implementations.

use std::process::{Command, Stdio};

use crate::programs::{Implementation, Program, Server, eventually, home, output};

/// The environment that all tests use.
pub(crate) const ENVIRONMENT: &str = "interop";

/// A rendezvous, and tokens for it.
pub(crate) struct Cloud {
    service: Program,
    url: String,
    token: String,
    manager: String,
    home: tempfile::TempDir,
}

impl Cloud {
    pub(crate) fn start() -> Self {
        let home = home();
        let (service, url) = serve(&home, "127.0.0.1:0");
        let data = home.path().join("data");
        let token = |arguments: &[&str]| {
            let mut command = Implementation::Ours.program(home.path());
            command.args(["rendezvous", "token", "create", "--data"]).arg(&data).args(arguments);
            output(&mut command).success().trim().to_owned()
        };
        let (one, manager) = (
            token(&["--environment", ENVIRONMENT, "--can", "register,connect"]),
            token(&["--all", "--can", "manage"]),
        );
        Self { service, url, token: one, manager, home }
    }

    /// Kills the rendezvous and starts it again at the same address.
    pub(crate) fn restart(&mut self) {
        let address = self.url.strip_prefix("http://").unwrap().to_owned();
        let _ = self.service.child.kill();
        let _ = self.service.child.wait();
        let (service, _) = serve(&self.home, &address);
        self.service = service;
    }

    /// Starts a server of the environment and waits until it is online.
    pub(crate) fn serving(
        &self,
        implementation: Implementation,
        change: impl FnOnce(&mut Command),
    ) -> Program {
        let mut command = implementation.program(self.home.path());
        command.args(["exec-server", "--remote", &self.url, "--environment-id", ENVIRONMENT]);
        command.env("CODEX_API_KEY", &self.token).stdout(Stdio::null());
        change(&mut command);
        let server = Program::start(&mut command);
        self.online(&server);
        server
    }

    /// Starts a server of ours that forwards every stream to a listening server.
    pub(crate) fn forwarding(&self, to: &Server) -> Program {
        let mut command = Implementation::Ours.program(self.home.path());
        command.args(["exec-server", "forward", "--connect", &to.url, "--remote", &self.url]);
        command.args(["--environment-id", ENVIRONMENT]).env("CODEX_API_KEY", &self.token);
        let server = Program::start(command.stdout(Stdio::null()));
        self.online(&server);
        server
    }

    fn online(&self, server: &Program) {
        eventually(&format!("the environment is online: {}", server.log()), || {
            let mut command = Implementation::Ours.program(self.home.path());
            command.args(["environments", "show", ENVIRONMENT, "--json", "--registry", &self.url]);
            let result = output(command.env("CODEX_API_KEY", &self.manager));
            let shown: serde_json::Value = serde_json::from_str(&result.out).unwrap_or_default();
            shown["online"] == true
        });
    }

    /// Our command line, set up for the environment.
    pub(crate) fn ours(&self, subcommand: &str) -> Command {
        let mut command = Implementation::Ours.program(self.home.path());
        command.args([subcommand, "--on", &format!("env:{ENVIRONMENT}"), "--registry", &self.url]);
        command.env("CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN", &self.token);
        command
    }

    /// Sets their client up for the environment.
    pub(crate) fn theirs(&self, command: &mut Command) {
        command
            .env("CODEX_EXEC_SERVER_NOISE_REGISTRY_URL", &self.url)
            .env("CODEX_EXEC_SERVER_NOISE_ENVIRONMENT_ID", ENVIRONMENT)
            .env("CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN", &self.token);
    }
}

fn serve(home: &tempfile::TempDir, listen: &str) -> (Program, String) {
    let mut command = Implementation::Ours.program(home.path());
    command.args(["rendezvous", "serve", "--listen", listen, "--data"]);
    let mut service = Program::start(command.arg(home.path().join("data")).stdout(Stdio::piped()));
    let url = service.first_line();
    (service, url)
}
