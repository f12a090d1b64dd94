//! A process with a managed network: the host returns the sockets to serve with the started process.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use codex_exec_host::process::{
    Group, Launch, ProcessConfig, ProcessHandle, ProcessHost, StartError, Started, environment,
};
use codex_exec_host::sandbox::{
    ManagedNetwork, NativeSandbox, NetworkDescriptors, Program, SandboxBackend, SandboxConfig,
};
use codex_exec_server_protocol::process::ExecParams;
use codex_exec_server_protocol::{PermissionProfile, SandboxContext};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::support::*;

fn executable() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let program = own.ancestors().nth(2).unwrap().join("examples/reentered");
    assert!(program.exists(), "run `cargo build -p codex-exec-host --examples` first");
    program
}

fn network() -> ManagedNetwork {
    ManagedNetwork { loopback_ports: vec![3128, 1080], transparent: false }
}

/// A process that asks both ports, without waiting for anything.
fn asks(tty: bool) -> ExecParams {
    let script =
        "for port in 3128 1080; do exec 3<>/dev/tcp/127.0.0.1/$port; echo word >&3; cat <&3; done";
    let mut params = params("");
    params.argv = ["/bin/bash", "-c", script].map(str::to_owned).to_vec();
    params.tty = tty;
    params
}

async fn start_managed(
    host: &ProcessHost,
    sandbox: &NativeSandbox,
    permissions: PermissionProfile,
    params: ExecParams,
) -> Result<(ProcessHandle, Started), StartError> {
    let environment = environment(&params, &[])?;
    let argv: Vec<OsString> = params.argv.iter().map(OsString::from).collect();
    let env: Vec<_> = environment.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
    let network = network();
    let cwd = Path::new("/");
    let program =
        Program { argv: &argv, arg0: None, env: &env, cwd, network: Some(&network), inherit: None };
    let context = SandboxContext::in_workspace(permissions, "file:///".parse().unwrap());
    let launch = sandbox.launch_program(&context, &program).unwrap().unwrap();
    let launch = Launch::confined(params, launch, Group(0))?;
    let (handle, started) = host.start(async move { Ok::<_, StartError>(launch) }, |_| None);
    Ok((handle, started.await.unwrap()?))
}

/// Accepts one connection on each port, reads a word, and answers with the port's place.
async fn serve(network: NetworkDescriptors) {
    assert!(network.tun.is_none() && network.dns_udp.is_empty() && network.dns_tcp.is_empty());
    for (place, listener) in network.listeners.into_iter().enumerate() {
        let listener = TcpListener::from_std(listener).unwrap();
        let (mut stream, from) = listener.accept().await.unwrap();
        assert!(from.ip().is_loopback());
        let mut word = [0; 5];
        stream.read_exact(&mut word).await.unwrap();
        stream.write_all(format!("served {place}\n").as_bytes()).await.unwrap();
    }
}

/// All output of a process, once it has written this much.
async fn output(handle: &ProcessHandle, end: &str) -> String {
    loop {
        let text = read(handle, 0).await;
        if text.contains(end) {
            return text;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn connections_made_at_once_are_served() {
    for spare in [false, true] {
        let mut config = ProcessConfig::default();
        config.spare_sandbox = spare;
        let host = ProcessHost::new(config).unwrap();
        let sandbox = NativeSandbox::new(SandboxConfig::new(executable())).unwrap();
        // From the second start on, a spare takes over if there is one.
        for tty in [false, true, false, true] {
            for permissions in [PermissionProfile::read_only(), PermissionProfile::Disabled] {
                let (handle, started) =
                    start_managed(&host, &sandbox, permissions, asks(tty)).await.unwrap();
                assert!(started.assurance.is_some());
                serve(started.network.unwrap()).await;
                let text = output(&handle, "served 1").await;
                assert!(text.contains("served 0"), "{text}");
            }
        }
        host.shut_down().await;
    }
}

#[tokio::test]
async fn a_failed_start_returns_no_network() {
    let host = ProcessHost::new(ProcessConfig::default()).unwrap();
    let sandbox = NativeSandbox::new(SandboxConfig::new(executable())).unwrap();
    let mut params = asks(false);
    params.argv = vec!["/nonexistent".to_owned()];
    let permissions = PermissionProfile::read_only();
    let failed = start_managed(&host, &sandbox, permissions, params).await.unwrap_err();
    assert!(matches!(&failed, StartError::Sandbox(failure) if failure.is_target()), "{failed:?}");
    host.shut_down().await;
}

/// Whatever ends the sandbox early, the start fails, and does not wait.
#[tokio::test]
async fn a_sandbox_that_is_killed_early_fails_the_start() {
    let host = ProcessHost::new(ProcessConfig::default()).unwrap();
    // Not a sandbox: exits at once, without a word on the status pipe.
    let other = PathBuf::from("/bin/true");
    let sandbox = NativeSandbox::new(SandboxConfig::new(other)).unwrap();
    let permissions = PermissionProfile::read_only();
    let failed = start_managed(&host, &sandbox, permissions, asks(false)).await.unwrap_err();
    assert!(
        matches!(&failed, StartError::Setup { source, .. } if source.kind() == std::io::ErrorKind::UnexpectedEof),
        "{failed:?}"
    );
    host.shut_down().await;
}
