//! Requests with a sandbox.
//!
//! Invariant: the server refuses what it cannot enforce; nothing runs with less protection than
//! requested.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Once};

use codex_exec_host::files::{Backend, FileError, Helpers};
use codex_exec_host::pool;
use codex_exec_host::process::{Environment, ProcessHost};
use codex_exec_host::sandbox::{
    Launch, ManagedNetwork, NativeSandbox, PolicyRefusal, Program, SandboxBackend, SandboxConfig,
};
use codex_exec_server_protocol::process::ExecParams;
use codex_exec_server_protocol::{
    Assurance, ErrorKind, PermissionProfile, RpcError, SandboxContext,
};

use crate::config::ServerConfig;
use crate::policy::{self, OperatorPolicy};

/// Confines requests, if this server can.
#[derive(Debug, Clone)]
pub(crate) struct Confiner {
    enforcer: Option<Enforcer>,
    /// Every request is held to the operator's policy.
    bounded: bool,
}

#[derive(Debug, Clone)]
struct Enforcer {
    sandbox: Arc<NativeSandbox>,
    helpers: Helpers,
}

impl Confiner {
    /// Re-enters the configured executable; without one, the server refuses sandboxes.
    pub(crate) fn new(config: &ServerConfig, host: &ProcessHost) -> io::Result<Self> {
        let bounded = config.policy.is_some();
        let Some(executable) = &config.sandbox_executable else {
            return Ok(Self { enforcer: None, bounded });
        };
        let mut setup = SandboxConfig::new(executable);
        setup.own_files = config.own_files.clone();
        setup.assurance = config.sandbox_assurance;
        setup.cache_plans = config.sandbox_plan_cache;
        setup.shares_pids = config.sandbox_shares_pids;
        setup.ceiling = config.policy.as_ref().map(OperatorPolicy::ceiling);
        let sandbox = Arc::new(NativeSandbox::new(setup)?);
        let helpers = Helpers::new(sandbox.clone(), host.clone(), config.files.clone());
        Ok(Self { enforcer: Some(Enforcer { sandbox, helpers }), bounded })
    }

    /// Whether this server can enforce a sandbox at all.
    pub(crate) fn is_available(&self) -> bool {
        self.enforcer.is_some()
    }

    /// The strongest level that this machine offers.
    pub(crate) fn assurance(&self) -> Option<Assurance> {
        self.enforcer.as_ref().and_then(|enforcer| enforcer.sandbox.assurance())
    }

    /// Whether every request is held to the operator's policy.
    pub(crate) fn is_bounded(&self) -> bool {
        self.bounded
    }

    /// Drops the cached plans: a path changed while a plan was in use.
    pub(crate) fn forget_plans(&self) {
        if let Some(enforcer) = &self.enforcer {
            enforcer.sandbox.forget_plans();
        }
    }

    /// The backend for a filesystem request under `context`: this process, or a sandboxed helper.
    pub(crate) fn backend(
        &self,
        mut context: Option<SandboxContext>,
        only_reads: bool,
    ) -> impl Future<Output = Result<Backend, FileError>> + Send + use<> {
        let (enforcer, bounded) = (self.enforcer.clone(), self.bounded);
        if bounded {
            policy::hold(&mut context);
        }
        async move {
            match (context.filter(|context| bounded || restricts(context)), enforcer) {
                (None, _) => Ok(Backend::Here),
                (Some(context), Some(enforcer)) => {
                    enforcer.helpers.backend(context, only_reads).await
                }
                (Some(_), None) => Err(FileError::Sandbox { reason: UNAVAILABLE.into() }),
            }
        }
    }

    /// The sandbox to start a process in; `None` if the policy restricts nothing and the network is not
    /// managed. The process gets `inherit` as descriptor 3. With a `denial` it runs no program: it prints
    /// that and ends as denied.
    pub(crate) async fn confine(
        &self,
        context: SandboxContext,
        params: &ExecParams,
        environment: &Environment,
        network: Option<ManagedNetwork>,
        inherit: Option<Arc<OwnedFd>>,
        denial: Option<String>,
    ) -> Result<Option<Launch>, RpcError> {
        if !self.bounded && !restricts(&context) && network.is_none() {
            return Ok(None);
        }
        let Some(Enforcer { sandbox, .. }) = self.enforcer.clone() else {
            return Err(RpcError::invalid_params(ErrorKind::SandboxUnavailable, UNAVAILABLE));
        };
        let argv: Vec<OsString> = params.argv.iter().map(OsString::from).collect();
        let arg0 = params.arg0.clone();
        let cwd = params.cwd.as_path().to_owned();
        let env: Vec<_> = environment.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
        // Resolving a policy reads the filesystem, which may block.
        let prepared = pool::blocking(move || {
            let arg0 = arg0.as_deref().map(OsStr::new);
            let (network, inherit) = (network.as_ref(), inherit.as_ref());
            let program = Program { argv: &argv, arg0, env: &env, cwd: &cwd, network, inherit };
            match denial {
                None => sandbox.launch_program(&context, &program),
                Some(message) => sandbox.launch_refusal(&context, &program, &message),
            }
        });
        match prepared.await {
            // Nothing runs without the operator's policy.
            Ok(Ok(None)) if self.bounded => Err(RpcError::internal(
                ErrorKind::Internal,
                "the operator's policy restricts nothing",
            )),
            Ok(Ok(None)) => Ok(None),
            Ok(Ok(Some(launch))) => {
                if launch.globs_truncated {
                    // Once: clients send the same policy with every request.
                    static WARNED: Once = Once::new();
                    WARNED.call_once(|| {
                        tracing::warn!(
                            "a policy's glob patterns apply only down to its glob_scan_max_depth"
                        );
                    });
                }
                Ok(Some(launch))
            }
            Ok(Err(error)) => Err(refusal(&error)),
            Err(error) => {
                let message = format!("cannot prepare the sandbox: {error}");
                Err(RpcError::internal(ErrorKind::Internal, message))
            }
        }
    }
}

/// The error for a request with a sandbox on a server without one.
const UNAVAILABLE: &str =
    "this server cannot enforce a sandbox; send no sandbox, or permissions of type `disabled`";

/// Whether the policy restricts anything.
fn restricts(sandbox: &SandboxContext) -> bool {
    !matches!(sandbox.permissions, PermissionProfile::Disabled)
}

fn refusal(error: &impl PolicyRefusal) -> RpcError {
    let mut message = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        message = format!("{message}: {cause}");
        source = cause.source();
    }
    match error.is_of_the_request() {
        true => RpcError::invalid_params(error.kind(), message),
        false => RpcError::internal(error.kind(), message),
    }
}
