//! Programs that attack the sandbox. Each prints the result of the system; success means that the
//! sandbox failed.

use std::ffi::CString;
use std::io::{self, Write};
use std::ptr;

/// Tries; 0 if it could be done.
pub(crate) fn attempt(name: &str, args: &[String]) -> i32 {
    match try_it(name, args) {
        Ok(()) => {
            eprintln!("{name}: done");
            0
        }
        Err(error) => {
            eprintln!("{name}: {error}");
            error.raw_os_error().unwrap_or(255)
        }
    }
}

fn c(text: &str) -> CString {
    CString::new(text).expect("no NUL")
}

fn ok(result: i64) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn ok32(result: i32) -> io::Result<()> {
    ok(i64::from(result))
}

/// A system call that is forbidden whatever its arguments.
fn call(number: libc::c_long) -> io::Result<()> {
    // SAFETY: all arguments are zero: a call that is not refused by number fails on them.
    ok(unsafe { libc::syscall(number, 0, 0, 0, 0, 0, 0) })
}

/// Any call, by its number: a number, `@text` for a pointer to that text, `%n` for a pointer to `n` zero
/// bytes, `<path` for a descriptor that is open for reading, `#pid` for the own process.
fn raw(words: &[String]) -> io::Result<()> {
    let mut buffers: Vec<Vec<u8>> = Vec::new();
    let mut pointer = |bytes: Vec<u8>| {
        let address = bytes.as_ptr() as u64;
        buffers.push(bytes);
        address
    };
    let mut arguments = [0; 6];
    for (argument, word) in arguments.iter_mut().zip(&words[1..]) {
        *argument = if let Some(text) = word.strip_prefix('@') {
            pointer(c(text).into_bytes_with_nul())
        } else if let Some(size) = word.strip_prefix('%') {
            pointer(vec![0; size.parse().expect("a size")])
        } else if let Some(path) = word.strip_prefix('<') {
            // SAFETY: the path outlives the call.
            unsafe { libc::open(c(path).as_ptr(), libc::O_RDONLY) as u64 }
        } else if word == "#pid" {
            u64::from(std::process::id())
        } else {
            word.parse::<u64>().expect("a number")
        };
    }
    let [a, b, c, d, e, f] = arguments;
    let number: libc::c_long = words[0].parse().expect("a number");
    // SAFETY: pointers are to buffers that outlive the call and are as large as the test says.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    if number == libc::SYS_clone && result == 0 {
        std::process::exit(0);
    }
    ok(result)
}

/// Makes `socket` or `socketpair` with each of these triples of arguments; prints the error numbers.
fn sockets(words: &[String]) -> io::Result<()> {
    let number: libc::c_long = words[0].parse().expect("a number");
    for triple in &words[1..] {
        let mut parts = triple.split(',').map(|part| part.parse::<u64>().expect("a number"));
        let mut next = || parts.next().expect("three numbers");
        let (family, kind, protocol) = (next(), next(), next());
        let mut pair = [-1i32; 2];
        // SAFETY: `socketpair` stores two descriptors there; `socket` ignores a fourth argument.
        let result = unsafe { libc::syscall(number, family, kind, protocol, pair.as_mut_ptr()) };
        let errno = ok(result).err().and_then(|error| error.raw_os_error()).unwrap_or(0);
        writeln!(io::stdout(), "{errno}")?;
        for fd in [result as i32, pair[0], pair[1]].into_iter().filter(|fd| *fd > 2) {
            // SAFETY: descriptors that were made just now.
            unsafe { libc::close(fd) };
        }
    }
    Ok(())
}

fn socket(family: i32, kind: i32) -> io::Result<()> {
    // SAFETY: no pointers.
    ok32(unsafe { libc::socket(family, kind, 0) })
}

/// Writes through a descriptor.
fn write_fd(fd: i32) -> io::Result<()> {
    // SAFETY: one byte that exists.
    ok(unsafe { libc::write(fd, b"!".as_ptr().cast(), 1) } as i64)
}

fn try_it(name: &str, args: &[String]) -> io::Result<()> {
    let path = |n: usize| c(&args[n]);
    // SAFETY: every pointer below is to a C string or structure that outlives its call.
    unsafe {
        match name {
            "read" => std::fs::read(&args[0]).map(drop),
            "list" => std::fs::read_dir(&args[0]).map(drop),
            "write" => std::fs::OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                .open(&args[0])
                .and_then(|mut file| io::Write::write_all(&mut file, b"!")),
            "truncate" => ok32(libc::truncate(path(0).as_ptr(), 0)),
            "mkdir" => std::fs::create_dir(&args[0]),
            "remove" => std::fs::remove_file(&args[0]),
            "rmdir" => std::fs::remove_dir(&args[0]),
            "rename" => std::fs::rename(&args[0], &args[1]),
            "link" => std::fs::hard_link(&args[0], &args[1]),
            "symlink" => std::os::unix::fs::symlink(&args[0], &args[1]),
            "chmod" => ok32(libc::chmod(path(0).as_ptr(), 0o777)),
            "mkfifo" => ok32(libc::mkfifo(path(0).as_ptr(), 0o666)),
            "mknod" => {
                ok32(libc::mknod(path(0).as_ptr(), libc::S_IFBLK | 0o666, libc::makedev(254, 0)))
            }
            "write-through-o-path" => {
                let fd = libc::open(path(0).as_ptr(), libc::O_PATH);
                ok32(fd)?;
                let again = c(&format!("/proc/self/fd/{fd}"));
                let fd = libc::open(again.as_ptr(), libc::O_WRONLY);
                ok32(fd)?;
                write_fd(fd)
            }
            "reopen-for-writing" => {
                let fd = libc::open(path(0).as_ptr(), libc::O_RDONLY);
                ok32(fd)?;
                let again = c(&format!("/proc/self/fd/{fd}"));
                let fd = libc::open(again.as_ptr(), libc::O_RDWR);
                ok32(fd)?;
                write_fd(fd)
            }
            "write-other-root" => {
                // Any process that is visible, through its own view of the tree.
                let mut last = Err(io::ErrorKind::NotFound.into());
                for entry in std::fs::read_dir("/proc")?.flatten() {
                    let pid = entry.file_name().to_string_lossy().into_owned();
                    if pid.parse::<u32>().is_ok() {
                        let target = format!("/proc/{pid}/root{}", args[0]);
                        last = std::fs::write(target, "!");
                        if last.is_ok() {
                            break;
                        }
                    }
                }
                last
            }
            "write-proc-sys" => std::fs::write("/proc/sys/kernel/core_pattern", "|/bin/true"),
            "write-own-mem" => {
                std::fs::OpenOptions::new().write(true).open("/proc/1/mem").map(drop)
            }
            "swap-race" => swap_race(&args[0], &args[1]),
            "connect-inet" => {
                let fd = libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0);
                ok32(fd)?;
                let address = libc::sockaddr_in {
                    sin_family: libc::AF_INET as u16,
                    sin_port: 53u16.to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from_be_bytes([127, 0, 0, 1]).to_be() },
                    sin_zero: [0; 8],
                };
                let size = size_of::<libc::sockaddr_in>() as u32;
                ok32(libc::connect(fd, (&raw const address).cast(), size))
            }
            "socket" => {
                socket(args[0].parse().expect("a number"), args[1].parse().expect("a number"))
            }
            "raw" => raw(args),
            "sockets" => sockets(args),
            "socketpair" => {
                let mut fds = [0; 2];
                let kind = args[0].parse().expect("a number");
                ok32(libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()))?;
                write_fd(fds[0])?;
                let mut byte = 0u8;
                ok(libc::read(fds[1], (&raw mut byte).cast(), 1) as i64)
            }
            "connect-unix" => std::os::unix::net::UnixStream::connect(&args[0]).map(drop),
            "connect-abstract" => {
                use std::os::linux::net::SocketAddrExt;
                let address = std::os::unix::net::SocketAddr::from_abstract_name(&args[0])?;
                std::os::unix::net::UnixStream::connect_addr(&address).map(drop)
            }
            "echo-inet" => echo_inet(
                args[0].parse().expect("a port"),
                args[1].parse().expect("a number"),
                args.len() > 2,
            ),
            "ask-tcp" => ask_tcp(&args[0], &args[1]),
            "ask-udp" => ask_udp(&args[0], &args[1]),
            "serve-itself" => serve_itself(),
            "swap-connect" => swap_connect(
                args[0].parse().expect("a port"),
                &args[1],
                args[2].parse().expect("a number"),
            ),
            "bind-unix" => std::os::unix::net::UnixListener::bind(&args[0]).map(drop),
            "ptrace" => ok(libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0)),
            "process_vm_readv" => call(libc::SYS_process_vm_readv),
            "io_uring" => call(libc::SYS_io_uring_setup),
            "unshare" => ok32(libc::unshare(libc::CLONE_NEWUSER)),
            "clone-newuser" => {
                let flags = libc::CLONE_NEWUSER | libc::SIGCHLD;
                let pid = libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0);
                if pid == 0 {
                    libc::_exit(0);
                }
                ok(pid)
            }
            "clone3" => call(libc::SYS_clone3),
            "setns" => {
                let fd = libc::open(c"/proc/self/ns/mnt".as_ptr(), libc::O_RDONLY);
                ok32(libc::setns(fd, 0))
            }
            "mount" => ok32(libc::mount(
                c"none".as_ptr(),
                path(0).as_ptr(),
                c"tmpfs".as_ptr(),
                0,
                ptr::null(),
            )),
            "umount" => ok32(libc::umount2(path(0).as_ptr(), libc::MNT_DETACH)),
            "remount" => ok32(libc::mount(
                ptr::null(),
                path(0).as_ptr(),
                ptr::null(),
                libc::MS_REMOUNT | libc::MS_BIND,
                ptr::null(),
            )),
            "open_tree" => call(libc::SYS_open_tree),
            "mount_setattr" => call(libc::SYS_mount_setattr),
            "chroot" => ok32(libc::chroot(path(0).as_ptr())),
            "pivot_root" => call(libc::SYS_pivot_root),
            "keyctl" => call(libc::SYS_keyctl),
            "add_key" => call(libc::SYS_add_key),
            "userfaultfd" => call(libc::SYS_userfaultfd),
            "bpf" => call(libc::SYS_bpf),
            "perf_event_open" => call(libc::SYS_perf_event_open),
            "open_by_handle_at" => call(libc::SYS_open_by_handle_at),
            "init_module" => call(libc::SYS_init_module),
            "kexec_load" => call(libc::SYS_kexec_load),
            #[cfg(target_arch = "x86_64")]
            "x32-ptrace" => call(0x4000_0000 | 521),
            #[cfg(target_arch = "x86_64")]
            "foreign-getpid" => {
                let mut result = 20u64;
                // SAFETY: the 32-bit getpid, which has no arguments and touches no memory.
                std::arch::asm!(
                    "int 0x80",
                    inlateout("rax") result,
                    out("r8") _, out("r9") _, out("r10") _, out("r11") _,
                );
                ok(result as i64)
            }
            "tiocsti" => ok32(libc::ioctl(0, libc::TIOCSTI, c"x".as_ptr())),
            "tiocsti-high-bits" => {
                // The kernel looks at the low half of the request only.
                let request = libc::TIOCSTI | (1 << 32);
                ok(libc::syscall(libc::SYS_ioctl, 0, request, c"x".as_ptr()))
            }
            "tioclinux" => ok32(libc::ioctl(0, libc::TIOCLINUX, c"\x06".as_ptr())),
            "kill" => ok32(libc::kill(args[0].parse().expect("a pid"), 0)),
            "kill-all" => ok32(libc::kill(-1, 0)),
            "setuid-root" => ok32(libc::setuid(0)),
            "sethostname" => ok32(libc::sethostname(c"x".as_ptr(), 1)),
            "fork-bomb" => fork_bomb(),
            "queue-signals" => queue_signals(),
            "count-pids" => {
                let pids = std::fs::read_dir("/proc")?
                    .flatten()
                    .filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok())
                    .count();
                if pids > 3 { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EPERM)) }
            }
            "open-descriptors" => {
                let extra = std::fs::read_dir("/proc/self/fd")?
                    .flatten()
                    .filter_map(|entry| entry.file_name().to_string_lossy().parse::<i32>().ok())
                    // The directory itself is open while it is read.
                    .filter(|fd| *fd > 3)
                    .count();
                if extra > 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EPERM)) }
            }
            "gain-by-no-new-privs" => ok32(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 0, 0, 0, 0)),
            other => panic!("unknown attempt {other}"),
        }
    }
}

/// Queues signals to itself, which does not take them, until there is no room; prints how many there were.
fn queue_signals() -> io::Result<()> {
    let signal = libc::SIGRTMIN();
    let mut queued = 0;
    // SAFETY: the set is emptied before it is used; the value is a number.
    let error = unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, signal);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        let value = libc::sigval { sival_ptr: std::ptr::null_mut() };
        loop {
            if libc::sigqueue(libc::getpid(), signal, value) != 0 {
                break io::Error::last_os_error();
            }
            queued += 1;
        }
    };
    writeln!(io::stdout(), "{queued}")?;
    if error.raw_os_error() == Some(libc::EAGAIN) { Ok(()) } else { Err(error) }
}

/// Writes through a name that is a link to the outside half of the time.
fn swap_race(directory: &str, outside: &str) -> io::Result<()> {
    let (file, link, name) =
        (format!("{directory}/file"), format!("{directory}/link"), format!("{directory}/name"));
    std::fs::write(&file, "")?;
    let _ = std::fs::remove_file(&link);
    std::os::unix::fs::symlink(outside, &link)?;
    for round in 0..20_000 {
        let _ = std::fs::hard_link(if round % 2 == 0 { &file } else { &link }, &name);
        if let Ok(mut open) = std::fs::OpenOptions::new().append(true).open(&name) {
            let _ = io::Write::write_all(&mut open, b"!");
        }
        let _ = std::fs::remove_file(&name);
    }
    Err(io::Error::from_raw_os_error(libc::EPERM))
}

fn address_of(port: u16) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_be_bytes([127, 0, 0, 1]).to_be() },
        sin_zero: [0; 8],
    }
}

/// Speaks to a port of this machine from so many threads at once.
fn echo_inet(port: u16, threads: usize, nonblocking: bool) -> io::Result<()> {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::os::fd::FromRawFd;
    let speak = move || -> io::Result<()> {
        let mut stream = if nonblocking {
            // SAFETY: the descriptor is new, and the address lives across the call.
            unsafe {
                let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK;
                let fd = libc::socket(libc::AF_INET, kind, 0);
                ok32(fd)?;
                let address = address_of(port);
                let size = size_of_val(&address) as u32;
                let connected = ok32(libc::connect(fd, (&raw const address).cast(), size));
                if connected.as_ref().is_err_and(|e| e.raw_os_error() != Some(libc::EINPROGRESS)) {
                    return connected;
                }
                let mut poll = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
                ok32(libc::poll(&raw mut poll, 1, -1))?;
                TcpStream::from_raw_fd(fd)
            }
        } else {
            TcpStream::connect(("127.0.0.1", port))?
        };
        stream.set_nonblocking(false)?;
        stream.write_all(b"word")?;
        let mut word = [0; 4];
        stream.read_exact(&mut word)
    };
    let running: Vec<_> = (0..threads).map(|_| std::thread::spawn(speak)).collect();
    running.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
}

/// Connects and sends a word; success if the answer is this.
fn ask_tcp(address: &str, answer: &str) -> io::Result<()> {
    use std::io::Read;
    let mut stream = std::net::TcpStream::connect(address)?;
    stream.write_all(b"word")?;
    let mut bytes = vec![0; answer.len()];
    stream.read_exact(&mut bytes)?;
    same(&bytes, answer)
}

/// Sends a datagram; success if the answer is this, and comes from there.
fn ask_udp(address: &str, answer: &str) -> io::Result<()> {
    let own = if address.starts_with('[') { "[::]:0" } else { "0.0.0.0:0" };
    let socket = std::net::UdpSocket::bind(own)?;
    socket.connect(address)?;
    socket.set_read_timeout(Some(std::time::Duration::from_secs(30)))?;
    socket.send(b"word")?;
    let mut bytes = [0; 64];
    let read = socket.recv(&mut bytes)?;
    same(&bytes[..read], answer)
}

fn same(bytes: &[u8], answer: &str) -> io::Result<()> {
    let text = String::from_utf8_lossy(bytes);
    if text == answer { Ok(()) } else { Err(io::Error::other(format!("{text:?}"))) }
}

/// Everything that a program may do on its own loopback.
fn serve_itself() -> io::Result<()> {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream, UdpSocket};
    for (bound, reached) in [
        ("127.0.0.1:0", "127.0.0.1"),
        ("0.0.0.0:0", "127.0.0.1"),
        ("[::1]:0", "::1"),
        ("[::]:0", "::1"),
    ] {
        let reached: std::net::IpAddr = reached.parse().expect("an address");
        let listener = TcpListener::bind(bound)?;
        let mut client = TcpStream::connect((reached, listener.local_addr()?.port()))?;
        let (mut stream, _) = listener.accept()?;
        stream.write_all(b"word")?;
        let mut word = [0; 4];
        client.read_exact(&mut word)?;
        let (one, other) = (UdpSocket::bind(bound)?, UdpSocket::bind(bound)?);
        one.send_to(b"word", (reached, other.local_addr()?.port()))?;
        other.recv(&mut word)?;
    }
    Ok(())
}

/// Swaps the descriptor and the address while `connect` is being decided on.
fn swap_connect(port: u16, path: &str, rounds: usize) -> io::Result<()> {
    use std::sync::atomic::{AtomicBool, Ordering};
    /// An address of either family, written to by one thread and read by the kernel for another.
    struct Shared(*mut libc::sockaddr_un);
    // SAFETY: it is only handed to the kernel and to copies that may be torn.
    unsafe impl Send for Shared {}
    // SAFETY: everything is a plain descriptor, or memory that is never freed.
    unsafe {
        let mut file: libc::sockaddr_un = std::mem::zeroed();
        file.sun_family = libc::AF_UNIX as u16;
        for (to, from) in file.sun_path.iter_mut().zip(path.bytes()) {
            *to = from as libc::c_char;
        }
        let mut inet: libc::sockaddr_un = std::mem::zeroed();
        let local = address_of(port);
        ptr::copy_nonoverlapping(
            (&raw const local).cast::<u8>(),
            (&raw mut inet).cast::<u8>(),
            size_of::<libc::sockaddr_in>(),
        );
        let address = Box::leak(Box::new(inet));
        let number = libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0);
        ok32(number)?;
        static STOP: AtomicBool = AtomicBool::new(false);
        let shared = Shared(address);
        let swapper = std::thread::spawn(move || {
            let shared = shared;
            while !STOP.load(Ordering::Relaxed) {
                for (family, value) in [(libc::AF_UNIX, &file), (libc::AF_INET, &inet)] {
                    let fd = libc::socket(family, libc::SOCK_STREAM, 0);
                    libc::dup2(fd, number);
                    libc::close(fd);
                    ptr::copy_nonoverlapping(value, shared.0, 1);
                }
            }
        });
        let mut last = Err(io::Error::from_raw_os_error(libc::EPERM));
        for _ in 0..rounds {
            let size = size_of::<libc::sockaddr_un>() as u32;
            let connected = libc::connect(number, (&raw const *address).cast(), size);
            let mut peer: libc::sockaddr_un = std::mem::zeroed();
            let mut length = size;
            // Success only if the socket file answers.
            if connected == 0
                && libc::getpeername(number, (&raw mut peer).cast(), &raw mut length) == 0
                && i32::from(peer.sun_family) == libc::AF_UNIX
            {
                last = Ok(());
            }
        }
        STOP.store(true, Ordering::Relaxed);
        let _ = swapper.join();
        last
    }
}

/// Forks until it is stopped; success is not to be stopped.
fn fork_bomb() -> io::Result<()> {
    for _ in 0..2_000 {
        // SAFETY: the child waits to be killed and does nothing else.
        unsafe {
            let pid = libc::fork();
            if pid == 0 {
                loop {
                    libc::pause();
                }
            }
            ok32(pid)?;
        }
    }
    Ok(())
}
