//! Returns freed memory to the system.
//!
//! The allocator returns free memory only at the end of a heap. It keeps the gaps between live objects for
//! ever: 10,000 process starts left 170 MiB. So a thread checks every few seconds, and trims the heap once
//! the server holds more memory than before and is quiet.

use std::thread;
use std::time::Duration;

/// How often to check.
const INTERVAL: Duration = Duration::from_secs(10);

/// The server is quiet if its memory changes by less than this between two checks, in bytes.
const QUIET_CHANGE: u64 = 1 << 20;

/// Memory to keep for the next requests, in bytes.
const RESERVE: u64 = 16 << 20;

/// Maximum number of checks between two useless attempts: ten minutes.
const LONGEST_PAUSE: u32 = 60;

/// Starts the thread. Without it, the server only keeps more memory.
pub(crate) fn start() {
    let _ = thread::Builder::new().name("exec-trim".into()).spawn(|| {
        // The memory of an idle server.
        let mut trimming = Trimming { least: resident(), ..Trimming::default() };
        loop {
            thread::sleep(INTERVAL);
            if let Some(now) = resident()
                && trimming.is_due(now)
            {
                trim();
                trimming.trimmed_to(resident().unwrap_or(now));
            }
        }
    });
}

/// Decides when to trim. How much memory is free is unknown, so it tries, and less often while that is
/// useless.
#[derive(Debug, Default)]
struct Trimming {
    /// Resident bytes at the last check.
    last: u64,
    /// The fewest resident bytes so far.
    least: Option<u64>,
    /// Checks to skip before the next attempt.
    pause: u32,
    /// The previous number of checks to skip.
    last_pause: u32,
}

impl Trimming {
    /// Whether to trim, with `resident` bytes now.
    fn is_due(&mut self, resident: u64) -> bool {
        let least = self.least.map_or(resident, |least| least.min(resident));
        self.least = Some(least);
        let is_quiet = self.last.abs_diff(resident) < QUIET_CHANGE;
        self.last = resident;
        if !is_quiet || resident <= least + RESERVE {
            return false;
        }
        self.pause = self.pause.saturating_sub(1);
        self.pause == 0
    }

    fn trimmed_to(&mut self, resident: u64) {
        let was_useful = resident + QUIET_CHANGE < self.last;
        self.last_pause =
            if was_useful { 3 } else { (self.last_pause * 2).clamp(3, LONGEST_PAUSE) };
        self.pause = self.last_pause;
        self.last = resident;
    }
}

/// Resident memory of this process, in bytes.
fn resident() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes no pointer, and may be called at any time, by any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn memory_is_trimmed_after_a_burst_and_not_during_one() {
        let mut trimming = Trimming::default();
        let checks = |trimming: &mut Trimming, checks: &[u64]| -> Vec<bool> {
            checks.iter().map(|&resident| trimming.is_due(resident * MIB)).collect()
        };
        assert_eq!(checks(&mut trimming, &[30, 30, 40, 46, 46]), [false; 5], "what may be kept");
        assert_eq!(checks(&mut trimming, &[120, 200, 180, 201]), [false; 4], "busy");
        assert_eq!(checks(&mut trimming, &[201]), [true]);
        // Memory in use stays, and attempts become rarer.
        trimming.trimmed_to(150 * MIB);
        assert_eq!(checks(&mut trimming, &[150; 3]), [false, false, true]);
        trimming.trimmed_to(150 * MIB);
        assert_eq!(checks(&mut trimming, &[150; 6]), [false, false, false, false, false, true]);
        trimming.trimmed_to(33 * MIB);
        assert_eq!(checks(&mut trimming, &[33; 9]), [false; 9]);
    }
}
