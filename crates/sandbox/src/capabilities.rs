//! What this machine can enforce, found out by trying.
//!
//! Invariant: a capability is claimed only if the very steps a sandbox takes have just worked in a
//! child process; a version number alone proves nothing where a container or a security module is in
//! the way.

use std::path::Path;

use crate::apply;

/// What this machine can enforce.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// A user namespace can be made.
    pub user_namespace: bool,
    /// A mount namespace can be made in it, and its tree be changed.
    pub mount_namespace: bool,
    /// A PID namespace can be made in it, and its `/proc` be mounted.
    pub pid_namespace: bool,
    /// An IPC and a network namespace can be made in it.
    pub network_namespace: bool,
    /// The version of Landlock, 0 if there is none.
    pub landlock_abi: u32,
    /// Programs can be loaded to filter system calls.
    pub seccomp: bool,
    /// The number of processes can be bounded for each PID namespace, root's too.
    pub process_limit_for_root: bool,
    /// Control groups, version 2, are there. Nothing depends on them.
    pub cgroup_v2: bool,
}

/// One line for a table: what, whether, and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// Whether it is there.
    pub available: bool,
    /// What was found.
    pub detail: String,
    /// What to do if it is not there; `None` if nothing is needed.
    pub remedy: Option<String>,
}

impl Capabilities {
    /// Tries everything. Takes some milliseconds.
    pub fn probe() -> Self {
        let tried = apply::probe::namespaces();
        Self {
            user_namespace: tried.user,
            mount_namespace: tried.mount,
            pid_namespace: tried.pid,
            network_namespace: tried.network,
            landlock_abi: apply::landlock::abi(),
            seccomp: apply::probe::seccomp(),
            process_limit_for_root: tried.pid_max,
            cgroup_v2: ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
                .iter()
                .any(|mount| Path::new(mount).join("cgroup.controllers").exists()),
        }
    }

    /// A machine without any of it.
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

    /// Whether the namespaces of the full sandbox can be made.
    pub fn namespaces(&self) -> bool {
        self.user_namespace
            && self.mount_namespace
            && self.pid_namespace
            && self.network_namespace
            && self.seccomp
    }

    /// Whether any policy at all can be enforced.
    pub fn any(&self) -> bool {
        self.namespaces() || (self.landlock_abi >= 6 && self.seccomp)
    }

    /// What to do where namespaces are missing.
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

    /// Everything as lines for a table.
    pub fn checks(&self) -> Vec<Check> {
        let line = |name, available: bool, remedy: &str| Check {
            name,
            available,
            detail: if available { "yes" } else { "no" }.to_owned(),
            remedy: (!available).then(|| remedy.to_owned()),
        };
        let namespaces = self.namespace_remedy();
        vec![
            line("user namespace", self.user_namespace, namespaces),
            line("mount namespace", self.mount_namespace, namespaces),
            line("PID namespace", self.pid_namespace, namespaces),
            line("network namespace", self.network_namespace, namespaces),
            Check {
                name: "Landlock",
                available: self.landlock_abi > 0,
                detail: match self.landlock_abi {
                    0 => "no".to_owned(),
                    abi => format!("version {abi}"),
                },
                remedy: match self.landlock_abi {
                    0 => Some(
                        "boot a kernel of 5.13 or newer with `landlock` in its lsm= list"
                            .to_owned(),
                    ),
                    1..6 if !self.namespaces() => {
                        Some("without namespaces a kernel of 6.12 or newer is needed".to_owned())
                    }
                    _ => None,
                },
            },
            line(
                "seccomp",
                self.seccomp,
                "boot a kernel with CONFIG_SECCOMP_FILTER, or allow seccomp in the container",
            ),
            line(
                "process limit for root",
                self.process_limit_for_root,
                "boot a kernel of 6.14 or newer, or run the server as another user",
            ),
            line("cgroup v2", self.cgroup_v2, "nothing: the sandbox does not need it"),
        ]
    }
}
