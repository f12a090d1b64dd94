//! An order to start a program, as one self-contained block of memory: it is sent to another process
//! and read between `clone` and `execve`.
//!
//! ```text
//! Head │ a pointer for each file, argument and variable, filled in where it is read │ strings
//! ```

use std::ffi::{CString, c_char};
use std::ptr;

use crate::process::command::Command;

/// Start of an order.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Head {
    files: u32,
    arguments: u32,
    variables: u32,
    flags: u32,
    /// The most files that it may have open; 0 if that is not limited.
    open_files: u32,
    /// So that pointers follow aligned.
    unused: u32,
}

const TTY: u32 = 1;
const CLEANS_UP: u32 = 2;
const EXECUTABLE: u32 = 4;
const CGROUP: u32 = 8;

/// What an order contains besides the [`Command`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OrderFlags {
    /// Descriptor 0 is a terminal, to become the controlling terminal.
    pub tty: bool,
    /// The program exits by itself when the server does, and must clean up before that.
    pub cleans_up: bool,
    /// Execute a descriptor instead of the files.
    pub executable: bool,
    /// A descriptor of `cgroup.procs` of the group to enter comes with the order.
    pub cgroup: bool,
    /// The most files that it may have open; 0 if that is not limited.
    pub open_files: u32,
}

/// An order with its pointers filled in. It points into the memory that it was opened in.
#[derive(Debug, Clone, Copy)]
pub(super) struct OpenedOrder {
    pub flags: OrderFlags,
    /// The files to try; `count` pointers.
    pub files: *const *const c_char,
    pub count: usize,
    /// Each ends with a null pointer.
    pub argv: *const *const c_char,
    pub env: *const *const c_char,
    pub cwd: *const c_char,
}

const HEAD: usize = size_of::<Head>();
const POINTER: usize = size_of::<*const c_char>();

/// Encodes an order. It must be stored aligned for pointers.
pub(super) fn write(command: &Command, flags: OrderFlags) -> Vec<u8> {
    let strings = || {
        [&command.cwd]
            .into_iter()
            .chain(&command.candidates)
            .chain(&command.argv)
            .chain(&command.env)
    };
    let pointers = slots(command.candidates.len(), command.argv.len(), command.env.len());
    let start = HEAD + pointers * POINTER;
    let len = start + strings().map(|s| s.as_bytes_with_nul().len()).sum::<usize>();
    let mut order = Vec::with_capacity(len);
    let set = [
        (flags.tty, TTY),
        (flags.cleans_up, CLEANS_UP),
        (flags.executable, EXECUTABLE),
        (flags.cgroup, CGROUP),
    ];
    let count = |strings: &[CString]| strings.len() as u32;
    for number in [
        count(&command.candidates),
        count(&command.argv),
        count(&command.env),
        set.into_iter().filter(|(set, _)| *set).map(|(_, flag)| flag).sum(),
        flags.open_files,
        0,
    ] {
        order.extend(number.to_ne_bytes());
    }
    order.resize(start, 0);
    for string in strings() {
        order.extend(string.as_bytes_with_nul());
    }
    order
}

/// Number of pointers in an order: two of the three lists end with null.
fn slots(files: usize, arguments: usize, variables: usize) -> usize {
    files + arguments + 1 + variables + 1
}

/// Fills in the pointers of an order; `None` if it is malformed.
pub(super) fn open(order: &mut [u8]) -> Option<OpenedOrder> {
    let mut numbers = order.get(..HEAD)?.chunks_exact(4);
    let mut number = || Some(u32::from_ne_bytes(numbers.next()?.try_into().ok()?));
    let (files, arguments, variables) =
        (number()? as usize, number()? as usize, number()? as usize);
    let (flags, open_files) = (number()?, number()?);
    let start = HEAD.checked_add(slots(files, arguments, variables).checked_mul(POINTER)?)?;
    if order.len() < start || !order.as_ptr().addr().is_multiple_of(align_of::<*const c_char>()) {
        return None;
    }
    let base = order.as_mut_ptr();
    let (lists, mut strings) = order.split_at_mut(start);
    let mut next = || {
        let end = strings.iter().position(|&byte| byte == 0)?;
        let (string, rest) = std::mem::take(&mut strings).split_at_mut(end + 1);
        strings = rest;
        Some(string.as_ptr().cast::<c_char>())
    };
    let cwd = next()?;
    let mut at = HEAD;
    for (count, ends) in [(files, false), (arguments, true), (variables, true)] {
        for n in 0..count + usize::from(ends) {
            let string = if n < count { next()? } else { ptr::null() };
            lists.get_mut(at..at + POINTER)?.copy_from_slice(&string.addr().to_ne_bytes());
            at += POINTER;
        }
    }
    let list = |before: usize| base.wrapping_add(HEAD + before * POINTER).cast_const().cast();
    Some(OpenedOrder {
        flags: OrderFlags {
            tty: flags & TTY != 0,
            cleans_up: flags & CLEANS_UP != 0,
            executable: flags & EXECUTABLE != 0,
            cgroup: flags & CGROUP != 0,
            open_files,
        },
        files: list(0),
        count: files,
        argv: list(files),
        env: list(files + arguments + 1),
        cwd,
    })
}

#[cfg(test)]
mod tests {
    use std::ffi::{CStr, OsString};
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    /// # Safety
    /// `count` pointers to strings.
    unsafe fn read(list: *const *const c_char, count: usize) -> Vec<Vec<u8>> {
        // SAFETY: the caller's promise.
        (0..count).map(|n| unsafe { CStr::from_ptr(*list.add(n)) }.to_bytes().to_vec()).collect()
    }

    /// Copies the bytes to memory that is aligned for pointers.
    fn aligned(order: &[u8]) -> Vec<u64> {
        let mut memory = vec![0_u64; order.len().div_ceil(8)];
        for (number, bytes) in memory.iter_mut().zip(order.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *number = u64::from_ne_bytes(whole);
        }
        memory
    }

    fn bytes(memory: &mut [u64], len: usize) -> &mut [u8] {
        assert!(len <= memory.len() * 8);
        // SAFETY: plain bytes of memory that is borrowed for as long.
        unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast(), len) }
    }

    fn command(args: &[String], env: &[(String, String)], cwd: &str) -> Command {
        let args: Vec<OsString> = args.iter().map(OsString::from).collect();
        let env = env.iter().map(|(name, value)| (name.into(), value.into())).collect();
        let rest = args.iter().map(OsString::as_os_str);
        Command::new("program".as_ref(), "zero".as_ref(), rest, &env, Path::new(cwd)).unwrap()
    }

    proptest! {
        #[test]
        fn orders_round_trip(
            args in proptest::collection::vec("[^\0]{0,20}", 0..6),
            env in proptest::collection::vec(("[A-Z]{1,5}", "[^\0]{0,20}"), 0..6),
            cwd in "/[^\0]{0,20}",
            bits in 0..16_u8,
            open_files: u32,
        ) {
            let flags = OrderFlags {
                tty: bits & 1 != 0,
                cleans_up: bits & 2 != 0,
                executable: bits & 4 != 0,
                cgroup: bits & 8 != 0,
                open_files,
            };
            let command = command(&args, &env, &cwd);
            let order = write(&command, flags);
            let mut memory = aligned(&order);
            let opened = open(bytes(&mut memory, order.len())).unwrap();
            prop_assert_eq!(opened.flags, flags);
            let all = |strings: &[CString]| -> Vec<Vec<u8>> {
                strings.iter().map(|s| s.as_bytes().to_vec()).collect()
            };
            // SAFETY: the counts are those that were written.
            unsafe {
                prop_assert_eq!(read(opened.files, opened.count), all(&command.candidates));
                prop_assert_eq!(read(opened.argv, command.argv.len()), all(&command.argv));
                prop_assert_eq!(read(opened.env, command.env.len()), all(&command.env));
                prop_assert!((*opened.argv.add(command.argv.len())).is_null());
                prop_assert!((*opened.env.add(command.env.len())).is_null());
                prop_assert_eq!(CStr::from_ptr(opened.cwd).to_bytes(), cwd.as_bytes());
            }
            // Every prefix is malformed.
            for len in 0..order.len() {
                let mut memory = aligned(&order[..len]);
                prop_assert!(open(bytes(&mut memory, len)).is_none());
            }
        }
    }
}
