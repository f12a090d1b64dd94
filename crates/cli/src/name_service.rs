//! Where a static program looks up hosts and users: in files and DNS, which the C library has built in.
//!
//! For anything else in `nsswitch.conf` a static C library would load the modules of the system's own, which may
//! have another version; that can end the program.

/// Keeps lookups to what is built in, whatever `nsswitch.conf` says. To be called before the first one.
#[cfg(all(target_os = "linux", target_env = "gnu", target_feature = "crt-static"))]
pub(crate) fn use_built_in_sources() {
    use std::ffi::{CStr, c_char, c_int};

    unsafe extern "C" {
        /// Of glibc, `<nss.h>`.
        fn __nss_configure_lookup(database: *const c_char, sources: *const c_char) -> c_int;
    }
    let databases: [(&CStr, &CStr); 3] =
        [(c"hosts", c"files dns"), (c"passwd", c"files"), (c"group", c"files")];
    for (database, sources) in databases {
        // SAFETY: both are strings that end with NUL and live as long as the program; nothing looks up a name yet.
        // It fails only for an unknown database.
        unsafe { __nss_configure_lookup(database.as_ptr(), sources.as_ptr()) };
    }
}

/// A program that is linked dynamically has the system's own library, and looks up what `nsswitch.conf` says.
#[cfg(not(all(target_os = "linux", target_env = "gnu", target_feature = "crt-static")))]
pub(crate) fn use_built_in_sources() {}
