//! What this machine can enforce, determined by trying.
//!
//! Invariant: a capability is claimed only if the steps that a sandbox takes have just worked in a
//! child process. A version number alone proves nothing: a container or a security module may
//! interfere.

use std::fmt::Write;
use std::path::Path;

use codex_exec_server_protocol::Assurance;

use crate::{apply, remedy};

/// What this machine can enforce.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// User namespaces can be created.
    pub user_namespace: bool,
    /// Mount namespaces can be created in it, and their mounts changed.
    pub mount_namespace: bool,
    /// PID namespaces can be created in it, and their `/proc` mounted.
    pub pid_namespace: bool,
    /// IPC and network namespaces can be created in it.
    pub network_namespace: bool,
    /// Landlock ABI version; 0 without Landlock.
    pub landlock_abi: u32,
    /// Seccomp filters can be loaded.
    pub seccomp: bool,
    /// The number of processes can be limited per PID namespace, also for root.
    pub process_limit_for_root: bool,
    /// Cgroup v2 is mounted. Nothing depends on it.
    pub cgroup_v2: bool,
}

/// One row of the table that `codex doctor` prints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// What was checked.
    pub name: &'static str,
    /// Whether it is available.
    pub available: bool,
    /// What was found.
    pub detail: String,
    /// How to get it; `None` if it is available.
    pub remedy: Option<String>,
    /// Whether full assurance depends on it.
    pub needed: bool,
}

/// Why this machine does not offer a level of assurance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shortfall {
    pub(crate) reason: String,
    pub(crate) remedy: String,
}

/// The first Landlock version that confines signals and abstract sockets.
pub(crate) const NEEDED_LANDLOCK: u32 = 6;

/// What a level lacks compared to full assurance.
pub fn lacks(level: Assurance) -> &'static str {
    match level {
        Assurance::Full => "nothing",
        Assurance::Namespaces => "no second layer backs up the namespaces",
        Assurance::Landlock => {
            "other processes are visible, /proc, /dev and IPC are the host's, and the server \
             refuses policies that revoke part of what they grant"
        }
    }
}

impl Capabilities {
    /// Tries everything. Takes some milliseconds.
    pub fn probe() -> Self {
        let supported = apply::probe::namespaces();
        Self {
            user_namespace: supported.user,
            mount_namespace: supported.mount,
            pid_namespace: supported.pid,
            network_namespace: supported.network,
            landlock_abi: apply::landlock::abi(),
            seccomp: apply::probe::seccomp(),
            process_limit_for_root: supported.pid_max,
            cgroup_v2: ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
                .iter()
                .any(|mount| Path::new(mount).join("cgroup.controllers").exists()),
        }
    }

    /// A machine without any capability.
    pub fn none() -> Self {
        Self {
            user_namespace: false,
            mount_namespace: false,
            pid_namespace: false,
            network_namespace: false,
            landlock_abi: 0,
            seccomp: false,
            process_limit_for_root: false,
            cgroup_v2: false,
        }
    }

    /// Whether all namespaces of the full sandbox can be created.
    pub fn namespaces(&self) -> bool {
        self.user_namespace
            && self.mount_namespace
            && self.pid_namespace
            && self.network_namespace
            && self.seccomp
    }

    /// The highest assurance that this machine offers; `None` if it can enforce nothing.
    pub fn assurance(&self) -> Option<Assurance> {
        let landlock = self.landlock_abi >= NEEDED_LANDLOCK;
        match (self.namespaces(), landlock) {
            (true, true) => Some(Assurance::Full),
            (true, false) => Some(Assurance::Namespaces),
            (false, true) if self.seccomp => Some(Assurance::Landlock),
            (false, _) => None,
        }
    }

    /// The offered assurance, if it reaches `minimum`; else what is missing and how to get it.
    pub(crate) fn require(&self, minimum: Assurance) -> Result<Assurance, Shortfall> {
        let offered = self.assurance();
        if let Some(offered) = offered.filter(|offered| *offered >= minimum) {
            return Ok(offered);
        }
        let missing = self.checks().into_iter().filter(|check| check.needed && !check.available);
        let (names, remedies): (Vec<_>, Vec<_>) =
            missing.map(|check| (check.name, check.remedy.unwrap_or_default())).unzip();
        let reason = match offered {
            None => format!("this machine cannot enforce any; missing: {}", names.join(", ")),
            Some(offered) => format!(
                "assurance `{minimum}` is required, but this machine offers `{offered}`; missing: {}",
                names.join(", ")
            ),
        };
        let mut remedy = remedies.join("; ");
        if let Some(offered) = offered {
            let _ = write!(
                remedy,
                "; or accept `{offered}` with --sandbox-assurance {offered} or with `assurance` in \
                 the request: {}",
                lacks(offered)
            );
        }
        Err(Shortfall { reason, remedy })
    }

    /// How to get the missing namespaces.
    pub(crate) fn namespace_remedy(&self) -> &'static str {
        if !self.user_namespace {
            "allow user namespaces (sysctl user.max_user_namespaces above 0, \
             kernel.unprivileged_userns_clone=1 where it exists; in a container, a seccomp profile \
             that allows clone and unshare)"
        } else if !self.mount_namespace {
            "allow mounting inside user namespaces (on Ubuntu sysctl \
             kernel.apparmor_restrict_unprivileged_userns=0 or an AppArmor profile for this program; \
             in a container, unconfined AppArmor and seccomp profiles)"
        } else if !self.pid_namespace {
            "allow mounting /proc in a new PID namespace (in a container, unmask /proc, e.g. \
             --security-opt systempaths=unconfined)"
        } else {
            "allow network and IPC namespaces (sysctl user.max_net_namespaces and \
             user.max_ipc_namespaces above 0)"
        }
    }

    /// All rows of the table.
    pub fn checks(&self) -> Vec<Check> {
        let line = |name, available: bool, needed: bool, remedy: fn() -> String| Check {
            name,
            available,
            detail: if available { "yes" } else { "no" }.to_owned(),
            remedy: (!available).then(remedy),
            needed,
        };
        // The others are tried inside a user namespace; without one, nothing is known about them.
        let user = self.user_namespace;
        let inside = |remedy: fn() -> String| if user { remedy } else { remedy::user_namespace };
        vec![
            line("user namespace", user, true, remedy::user_namespace),
            line("mount namespace", self.mount_namespace, true, inside(remedy::mount_namespace)),
            line("PID namespace", self.pid_namespace, true, inside(remedy::pid_namespace)),
            line(
                "network namespace",
                self.network_namespace,
                true,
                inside(remedy::network_namespace),
            ),
            Check {
                name: "Landlock 6",
                available: self.landlock_abi >= NEEDED_LANDLOCK,
                detail: match self.landlock_abi {
                    0 => "no".to_owned(),
                    abi => format!("version {abi}"),
                },
                remedy: (self.landlock_abi < NEEDED_LANDLOCK)
                    .then(|| remedy::landlock(self.landlock_abi)),
                needed: true,
            },
            line("seccomp", self.seccomp, true, || remedy::SECCOMP.to_owned()),
            line(
                "process limit for root",
                self.process_limit_for_root,
                false,
                inside(remedy::process_limit),
            ),
            line("cgroup v2", self.cgroup_v2, false, || {
                "nothing: the sandbox does not need it".to_owned()
            }),
        ]
    }
}
