//! Assurance of a sandbox: never less than required.

use std::os::unix::process::CommandExt;
use std::process::Command;

use codex_exec_server_protocol::{Assurance, PermissionProfile, SandboxContext};
use codex_linux_sandbox::decide::policy::Surroundings;
use codex_linux_sandbox::{Capabilities, Config, PrepareError, Sandbox};

use super::support::*;

/// The level that is used for a request with `asked`, on a server configured with `configured`.
fn used(
    capabilities: &Capabilities,
    configured: Assurance,
    asked: Option<Assurance>,
) -> Result<Assurance, String> {
    let mut config = Config::new("/codex");
    config.capabilities = Some(capabilities.clone());
    config.assurance = configured;
    let mut context = SandboxContext::new(PermissionProfile::read_only());
    context.assurance = asked;
    match Sandbox::new(config).unwrap().plan(&context, Surroundings::default()) {
        Ok(planned) => Ok(planned.unwrap().enforcement().assurance),
        Err(error @ PrepareError::Unsupported { .. }) => Err(error.to_string()),
        Err(error) => panic!("{error}"),
    }
}

fn machine(namespaces: bool, landlock_abi: u32, seccomp: bool) -> Capabilities {
    Capabilities {
        user_namespace: namespaces,
        mount_namespace: namespaces,
        pid_namespace: namespaces,
        network_namespace: namespaces,
        landlock_abi,
        seccomp,
        ..Capabilities::none()
    }
}

#[test]
fn weaker_assurance_is_used_only_if_accepted() {
    use Assurance::{Full, Landlock, Namespaces};
    let full = machine(true, 6, true);
    let namespaces = machine(true, 5, true);
    let landlock = machine(false, 7, true);
    let none = machine(false, 5, true);
    let no_seccomp = machine(true, 7, false);
    // The machine; the server's configuration; the request's level; the result.
    for (n, (machine, configured, asked, expected)) in [
        (&full, Full, None, Some(Full)),
        (&full, Landlock, None, Some(Full)),
        (&full, Landlock, Some(Landlock), Some(Full)),
        (&namespaces, Full, None, None),
        (&namespaces, Namespaces, None, Some(Namespaces)),
        (&namespaces, Landlock, None, Some(Namespaces)),
        (&namespaces, Full, Some(Namespaces), Some(Namespaces)),
        (&namespaces, Landlock, Some(Full), None),
        (&landlock, Full, None, None),
        (&landlock, Namespaces, None, None),
        (&landlock, Landlock, None, Some(Landlock)),
        (&landlock, Full, Some(Landlock), Some(Landlock)),
        (&landlock, Landlock, Some(Namespaces), None),
        (&none, Landlock, Some(Landlock), None),
        (&no_seccomp, Landlock, Some(Landlock), None),
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(used(machine, configured, asked).ok(), expected, "row {n}");
    }
}

#[test]
fn refusal_names_what_is_missing_and_how_to_get_it() {
    let said = used(&machine(false, 7, true), Assurance::Full, None).unwrap_err();
    for part in [
        "assurance `full` is required, but this machine offers `landlock`",
        "missing: user namespace, mount namespace",
        "--sandbox-assurance landlock",
        "other processes are visible",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let said = used(&machine(true, 3, true), Assurance::Full, None).unwrap_err();
    for part in ["missing: Landlock 6", "boot Linux 6.12", "--sandbox-assurance namespaces"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let said = used(&Capabilities::none(), Assurance::Landlock, None).unwrap_err();
    assert!(said.contains("this machine cannot enforce any"), "{said}");
    assert!(!said.contains("--sandbox-assurance"), "there is nothing to permit: {said}");
}

#[test]
fn every_machine_offers_what_the_model_says() {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut below = |n: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) % n
    };
    for round in 0..2_000 {
        let capabilities = Capabilities {
            user_namespace: below(4) > 0,
            mount_namespace: below(4) > 0,
            pid_namespace: below(4) > 0,
            network_namespace: below(4) > 0,
            landlock_abi: below(9) as u32,
            seccomp: below(6) > 0,
            process_limit_for_root: below(2) == 0,
            cgroup_v2: below(2) == 0,
        };
        let level = |n: u64| Assurance::ALL[n as usize];
        let configured = level(below(3));
        let asked = (below(2) == 0).then(|| level(below(3)));

        let c = &capabilities;
        let spaces =
            c.user_namespace && c.mount_namespace && c.pid_namespace && c.network_namespace;
        let offered = match (c.seccomp, spaces, c.landlock_abi >= 6) {
            (true, true, true) => 3,
            (true, true, false) => 2,
            (true, false, true) => 1,
            _ => 0,
        };
        let least = 1 + asked.unwrap_or(configured) as usize;
        let expected = (offered >= least).then(|| Assurance::ALL[offered - 1]);

        let found = used(&capabilities, configured, asked).ok();
        assert_eq!(found, expected, "round {round}: {capabilities:?} {configured} {asked:?}");
    }
}

/// Runs a command, and all it starts, as on a kernel without Landlock.
fn without_landlock(command: &mut Command) -> &mut Command {
    let instruction = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let (load, equals, answer) = (
        libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
        libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
        libc::BPF_RET | libc::BPF_K,
    );
    let number = libc::SYS_landlock_create_ruleset as u32;
    let mut filter = [
        instruction(load, 0, 0, 0),
        instruction(equals, 0, 1, number),
        instruction(answer, 0, 0, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
        instruction(answer, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    // SAFETY: two system calls; the filter is owned by the closure.
    unsafe {
        command.pre_exec(move || {
            let program =
                libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
            let set = libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
                    == 0;
            if set { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        })
    }
}

#[test]
fn without_landlock_nothing_runs_unless_accepted() {
    for user in users() {
        let world = World::new(user);
        let mut context = world.context(PermissionProfile::read_only());
        let run = |context: &SandboxContext, claims: bool| {
            let mut command = world.server(context, &world.work, ["echo", "ran"]);
            if claims {
                command.env("TEST_CLAIMS_LANDLOCK", "1");
            }
            finish(without_landlock(&mut command))
        };
        let refused = run(&context, false);
        assert_eq!(refused.code, REFUSED, "{refused:?}");
        assert!(refused.err.contains("missing: Landlock 6"), "{refused:?}");
        // Probed as available, but the inner process finds it missing.
        let failed = run(&context, true);
        assert_eq!(failed.code, FAILED, "{failed:?}");
        assert!(failed.err.contains("Landlock") && !failed.out.contains("ran"), "{failed:?}");
        context.assurance = Some(Assurance::Namespaces);
        run(&context, false).ok();
    }
}
