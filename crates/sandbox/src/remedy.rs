//! How to make a machine offer more: the exact setting to change, as far as it can be determined.

use std::fs;

/// Whether this is a container, as far as can be seen.
fn in_container() -> bool {
    ["/.dockerenv", "/run/.containerenv"].iter().any(|file| fs::exists(file).unwrap_or(false))
}

fn setting(name: &str) -> Option<i64> {
    fs::read_to_string(format!("/proc/sys/{name}")).ok()?.trim().parse().ok()
}

const CONTAINER_NAMESPACES: &str = "start the container with --security-opt seccomp=unconfined and \
                                    --security-opt apparmor=unconfined";

/// When user namespaces cannot be created.
pub(crate) fn user_namespace() -> String {
    if setting("user/max_user_namespaces") == Some(0) {
        "sysctl -w user.max_user_namespaces=15000 (it is 0)".to_owned()
    } else if setting("kernel/unprivileged_userns_clone") == Some(0) {
        "sysctl -w kernel.unprivileged_userns_clone=1 (it is 0)".to_owned()
    } else if in_container() {
        CONTAINER_NAMESPACES.to_owned()
    } else {
        "boot a kernel with CONFIG_USER_NS, and allow clone and unshare in the seccomp filter that \
         the server runs under"
            .to_owned()
    }
}

/// When mounts cannot be changed in a user namespace.
pub(crate) fn mount_namespace() -> String {
    if setting("kernel/apparmor_restrict_unprivileged_userns") == Some(1) {
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 (it is 1), or an AppArmor profile \
         for this program with the rule `userns,`"
            .to_owned()
    } else if in_container() {
        CONTAINER_NAMESPACES.to_owned()
    } else if setting("user/max_mnt_namespaces") == Some(0) {
        "sysctl -w user.max_mnt_namespaces=15000 (it is 0)".to_owned()
    } else {
        "allow mount and open_tree in the seccomp filter and the security module that the server runs \
         under"
            .to_owned()
    }
}

/// When `/proc` cannot be mounted in a new PID namespace.
pub(crate) fn pid_namespace() -> String {
    if setting("user/max_pid_namespaces") == Some(0) {
        "sysctl -w user.max_pid_namespaces=15000 (it is 0)".to_owned()
    } else {
        "let /proc be mounted: where a part of it is covered, as in a container, start that with \
         --security-opt systempaths=unconfined"
            .to_owned()
    }
}

/// When network or IPC namespaces cannot be created.
pub(crate) fn network_namespace() -> String {
    let zero = ["net", "ipc"].into_iter().find(|kind| {
        let name = format!("user/max_{kind}_namespaces");
        setting(&name) == Some(0)
    });
    match zero {
        Some(kind) => format!("sysctl -w user.max_{kind}_namespaces=15000 (it is 0)"),
        None => "boot a kernel with CONFIG_NET_NS and CONFIG_IPC_NS".to_owned(),
    }
}

/// When Landlock is missing or too old.
pub(crate) fn landlock(abi: u32) -> String {
    if abi > 0 {
        return format!("boot Linux 6.12 or newer (version 6 is needed, this is version {abi})");
    }
    match fs::read_to_string("/sys/kernel/security/lsm") {
        Ok(modules) if !modules.contains("landlock") => {
            format!("boot Linux 6.12 or newer with lsm=landlock,{}", modules.trim())
        }
        _ if in_container() => {
            "start the container with a seccomp profile that allows landlock_create_ruleset"
                .to_owned()
        }
        _ => "boot Linux 6.12 or newer with `landlock` in its lsm= list, and allow \
              landlock_create_ruleset in the seccomp filter that the server runs under"
            .to_owned(),
    }
}

/// When the number of root's processes cannot be limited.
pub(crate) fn process_limit() -> String {
    "boot a kernel of 6.14 or newer, or run the server as another user".to_owned()
}

/// When seccomp filters cannot be loaded.
pub(crate) const SECCOMP: &str =
    "boot a kernel with CONFIG_SECCOMP_FILTER, or allow seccomp in the container";
