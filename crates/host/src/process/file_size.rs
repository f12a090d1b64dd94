//! The limit on the size of files (`ulimit -f`).

use std::ffi::c_int;

/// Makes writes beyond the file size limit fail with `EFBIG` instead of killing this process by
/// `SIGXFSZ`. Executed programs get the default action: a handler, unlike an ignored signal, does not
/// survive `execve`.
pub(crate) fn handle_file_size_signal() {
    extern "C" fn nothing(_: c_int) {}
    // SAFETY: a valid action whose handler does nothing, which is allowed at any moment.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(c_int) as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGXFSZ, &raw const action, std::ptr::null_mut());
    }
}
