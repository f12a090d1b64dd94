//! Landlock: a second layer besides namespaces, or the only one without them.
//!
//! Invariant: as the only layer, and at full assurance, everything must be enforced; otherwise this
//! uses what the kernel has, possibly nothing.

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope,
};

use rustix::io::Errno;

use codex_exec_server_protocol::Assurance;

use super::{at, streams, sys};
use crate::capabilities::NEEDED_LANDLOCK;
use crate::plan::{Grant, Isolation, Network, Plan};
use crate::status::{Failure, Stage};

/// The newest Landlock version whose rights are known here.
const NEWEST: ABI = ABI::V6;

/// The kernel's Landlock version, 0 without Landlock.
pub(crate) fn abi() -> u32 {
    const ASK_VERSION: u32 = 1;
    // SAFETY: with this flag the call takes no attributes and answers the version.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<libc::c_void>(),
            0usize,
            ASK_VERSION,
        )
    };
    sys::check(version).map_or(0, |version| version as u32)
}

/// Step `Landlock`.
pub(super) fn enter(plan: &Plan) -> Result<(), Failure> {
    let enforcement = &plan.enforcement;
    let required = enforcement.isolation == Isolation::LandlockOnly
        || enforcement.assurance == Assurance::Full;
    if required && abi() < NEEDED_LANDLOCK {
        let message =
            format!("the kernel has version {}, but version {NEEDED_LANDLOCK} is needed", abi());
        return Err(Failure::new(Stage::Landlock, libc::ENOSYS, message));
    }
    let failed =
        |error: landlock::RulesetError| Failure::new(Stage::Landlock, 0, error.to_string());
    let level = if required { CompatLevel::HardRequirement } else { CompatLevel::BestEffort };
    let mut ruleset = Ruleset::default().set_compatibility(level);
    if enforcement.rules.is_some() {
        ruleset = ruleset.handle_access(AccessFs::from_all(NEWEST)).map_err(failed)?;
    }
    if plan.network == Network::None {
        ruleset = ruleset.handle_access(AccessNet::from_all(NEWEST)).map_err(failed)?;
    }
    let mut ruleset = ruleset
        .scope(Scope::from_all(NEWEST))
        .and_then(Ruleset::create)
        .map_err(failed)?
        // A rule for a file may include rights that only directories have.
        .set_compatibility(CompatLevel::BestEffort);
    for rule in enforcement.rules.iter().flatten() {
        let fd = match sys::open_absolute(&rule.path) {
            Ok(fd) => fd,
            // A rule for a path that is missing or cannot be entered has nothing to grant.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS) => continue,
            // Resolved paths have no links: another process has put one there.
            Err(errno) => return Err(at(Stage::Landlock, &rule.path)(errno)),
        };
        let access = rights(rule.grant);
        ruleset = ruleset.add_rule(PathBeneath::new(fd, access)).map_err(failed)?;
    }
    for (stream, grant) in streams::granted().filter(|_| enforcement.rules.is_some()) {
        ruleset = ruleset.add_rule(PathBeneath::new(stream, rights(grant))).map_err(failed)?;
    }
    let status = ruleset.restrict_self().map_err(failed)?;
    if required && status.ruleset == RulesetStatus::NotEnforced {
        return Err(Failure::new(Stage::Landlock, libc::ENOSYS, "nothing was enforced"));
    }
    Ok(())
}

fn rights(grant: Grant) -> BitFlags<AccessFs> {
    match grant {
        Grant::List => AccessFs::ReadDir.into(),
        Grant::Read => AccessFs::from_read(NEWEST),
        Grant::Write => AccessFs::from_all(NEWEST),
        Grant::Output => AccessFs::WriteFile | AccessFs::Truncate,
        Grant::Device => {
            AccessFs::ReadFile
                | AccessFs::ReadDir
                | AccessFs::WriteFile
                | AccessFs::Truncate
                | AccessFs::IoctlDev
        }
    }
}
