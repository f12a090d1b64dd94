//! Memory that was freed, given back to the system.
//!
//! The allocator gives back what lies free at the end of a heap. What many processes have left free
//! between things that stay, it keeps for ever: 10,000 starts left 170 MiB. So a thread looks every
//! few seconds, and once the server has more than it needed before and is quiet, has all of it given
//! back.

use std::thread;
use std::time::Duration;

/// How often it is looked.
const INTERVAL: Duration = Duration::from_secs(10);

/// A process whose memory changes by less between two looks is quiet.
const QUIET_CHANGE: u64 = 1 << 20;

/// What may be kept, as it is what the next requests will want.
const RESERVE: u64 = 16 << 20;

/// Looks between two tries that are of no use, at most: ten minutes.
const LONGEST_PAUSE: u32 = 60;

/// Starts the thread. Without one, the memory is kept, and that is all.
pub(crate) fn start() {
    let _ = thread::Builder::new().name("exec-trim".into()).spawn(|| {
        // What a server has that has done nothing yet.
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

/// When it is worth it. How much lies free cannot be seen, so it is tried, less and less often while it
/// is of no use.
#[derive(Debug, Default)]
struct Trimming {
    /// What was resident at the last look.
    last: u64,
    /// The least that ever was.
    least: Option<u64>,
    /// Looks to let pass before the next try.
    pause: u32,
    /// How many that were, the last time.
    last_pause: u32,
}

impl Trimming {
    /// Whether to give memory back, now that `resident` bytes are.
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
        let was_of_use = resident + QUIET_CHANGE < self.last;
        self.last_pause =
            if was_of_use { 3 } else { (self.last_pause * 2).clamp(3, LONGEST_PAUSE) };
        self.pause = self.last_pause;
        self.last = resident;
    }
}

/// Memory that this process has, in bytes.
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
    fn memory_is_given_back_after_a_burst_and_not_during_one() {
        let mut trimming = Trimming::default();
        let looks = |trimming: &mut Trimming, looks: &[u64]| -> Vec<bool> {
            looks.iter().map(|&resident| trimming.is_due(resident * MIB)).collect()
        };
        assert_eq!(looks(&mut trimming, &[30, 30, 40, 46, 46]), [false; 5], "what may be kept");
        assert_eq!(looks(&mut trimming, &[120, 200, 180, 201]), [false; 4], "busy");
        assert_eq!(looks(&mut trimming, &[201]), [true]);
        // What is in use stays, and is tried again less and less often: it may be free by then.
        trimming.trimmed_to(150 * MIB);
        assert_eq!(looks(&mut trimming, &[150; 3]), [false, false, true]);
        trimming.trimmed_to(150 * MIB);
        assert_eq!(looks(&mut trimming, &[150; 6]), [false, false, false, false, false, true]);
        trimming.trimmed_to(33 * MIB);
        assert_eq!(looks(&mut trimming, &[33; 9]), [false; 9]);
    }
}
