//! System calls for code that shares its memory with another process.
//!
//! Such code cannot use `errno`, which is in thread-local memory and so shared too. These calls return
//! errors as values, straight from the kernel. `rustix` does the same; this is for calls it lacks.

use std::arch::asm;
use std::ffi::c_long;

use rustix::io::Errno;

/// Makes a system call.
///
/// # Safety
/// The arguments must be valid for that system call.
pub(super) unsafe fn call<const N: usize>(
    number: c_long,
    arguments: [usize; N],
) -> Result<usize, Errno> {
    const { assert!(N <= 6) };
    let mut all = [0; 6];
    all[..N].copy_from_slice(&arguments);
    // SAFETY: the caller's promise.
    let answer = unsafe { enter(number, all) };
    match answer {
        -4095..0 => Err(Errno::from_raw_os_error(-answer as i32)),
        _ => Ok(answer as usize),
    }
}

#[cfg(target_arch = "x86_64")]
unsafe fn enter(number: c_long, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let answer;
    // SAFETY: the registers are those of the kernel's convention; it changes no others than those
    // named as clobbered, and memory only as the call says.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => answer,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    answer
}

#[cfg(target_arch = "aarch64")]
unsafe fn enter(number: c_long, [a, b, c, d, e, f]: [usize; 6]) -> isize {
    let answer;
    // SAFETY: as above.
    unsafe {
        asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a as isize => answer,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f,
            options(nostack),
        );
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_and_errors_are_distinguished() {
        // SAFETY: takes nothing.
        let pid = unsafe { call(libc::SYS_getpid, []) };
        assert_eq!(pid, Ok(std::process::id() as usize));
        // SAFETY: a descriptor that is none.
        let error = unsafe { call(libc::SYS_close, [usize::MAX]) };
        assert_eq!(error, Err(Errno::BADF));
        let mut buffer = [7_u8; 4];
        let zero = std::fs::File::open("/dev/zero").unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&zero) as usize;
        // SAFETY: writes as many bytes as the buffer has.
        let read = unsafe { call(libc::SYS_read, [fd, buffer.as_mut_ptr() as usize, 4]) };
        assert_eq!((read, buffer), (Ok(4), [0; 4]));
    }
}
