/* Steps that are a raw system call or a small protocol. Success is the sandbox's failure. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/if_alg.h>
#include <linux/netlink.h>
#include <linux/vm_sockets.h>
#include <mqueue.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "attacker.h"

/* Reads a name below every process there is to see, but for our own root and directory. */
static int every_process(const char *below)
{
    char path[4096], text[4096];
    int found = -1;
    DIR *proc = opendir("/proc");
    if (!proc) return -1;
    for (struct dirent *e; (e = readdir(proc));) {
        if (e->d_name[0] < '0' || e->d_name[0] > '9') continue;
        snprintf(path, sizeof path, "/proc/%s/%s", e->d_name, below);
        int fd = open(path, O_RDONLY | O_NONBLOCK);
        if (fd < 0) continue;
        ssize_t n = read(fd, text, sizeof text);
        if (n > 0 && write(1, text, n) == n) found = 0;
        close(fd);
    }
    closedir(proc);
    errno = EPERM;
    return found;
}

/* Every descriptor beyond the standard ones that anybody visible holds, by what it leads to. */
static int descriptors(void)
{
    int extra = -1;
    for (int fd = 3; fd < 1024; fd++)
        if (fcntl(fd, F_GETFD) >= 0) extra = 0;
    errno = EPERM;
    return extra;
}

static int inet(const char *host, int port)
{
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons(port)};
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
    int is_four = inet_pton(AF_INET, host, &four.sin_addr) == 1;
    if (!is_four && inet_pton(AF_INET6, host, &six.sin6_addr) != 1) {
        errno = EINVAL;
        return -1;
    }
    int fd = socket(is_four ? AF_INET : AF_INET6, SOCK_STREAM, 0);
    if (fd < 0) return -1;
    struct sockaddr *to = is_four ? (struct sockaddr *)&four : (struct sockaddr *)&six;
    if (connect(fd, to, is_four ? sizeof four : sizeof six) < 0) {
        int was = errno;
        close(fd);
        errno = was;
        return -1;
    }
    return fd;
}

/* One text message, masked as a client has to. */
static int frame(int fd, const char *text)
{
    unsigned char head[8] = {0x81};
    size_t size = strlen(text);
    int n = 2;
    if (size < 126) {
        head[1] = 0x80 | size;
    } else {
        head[1] = 0x80 | 126;
        head[2] = size >> 8;
        head[3] = size & 255;
        n = 4;
    }
    /* A mask of zeros leaves the text as it is. */
    if (write(fd, head, n) != n || write(fd, "\0\0\0\0", 4) != 4) return -1;
    return write(fd, text, size) == (ssize_t)size ? 0 : -1;
}

/* Asks a server for a process without a sandbox that creates a file, and waits for its end. */
static int front_door(const char *host, int port, const char *path, const char *token)
{
    char text[8192];
    int fd = inet(host, port);
    if (fd < 0) return -1;
    snprintf(text, sizeof text,
             "GET / HTTP/1.1\r\nHost: %s:%d\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
             "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n%s%s%s\r\n",
             host, port, *token ? "Authorization: Bearer " : "", token, *token ? "\r\n" : "");
    if (write(fd, text, strlen(text)) < 0) return -1;
    frame(fd, "{\"id\":1,\"method\":\"initialize\",\"params\":{\"clientName\":\"attacker\"}}");
    frame(fd, "{\"method\":\"initialized\"}");
    snprintf(text, sizeof text,
             "{\"id\":2,\"method\":\"process/start\",\"params\":{\"processId\":\"p\",\"argv\":"
             "[\"/bin/sh\",\"-c\",\"echo attack > %s\"],\"cwd\":\"/\",\"env\":{},\"tty\":false}}",
             path);
    frame(fd, text);
    /* Until the process has ended, or the server has. */
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    size_t held = 0;
    while (poll(&ready, 1, 5000) > 0) {
        ssize_t n = read(fd, text + held, sizeof text - held - 1);
        if (n <= 0) break;
        held += n;
        if (memmem(text, held, "process/closed", 14)) {
            close(fd);
            return 0;
        }
        if (held > sizeof text / 2) held = 0;
    }
    close(fd);
    errno = EPERM;
    return -1;
}

static int child_exits_well(int (*does)(const char *), const char *what)
{
    pid_t child = fork();
    int status = -1;
    if (child == 0) _exit(does(what) ? 1 : 0);
    waitpid(child, &status, 0);
    errno = EPERM;
    return status == 0 ? 0 : -1;
}

static int set_root(const char *path)
{
    return chroot(path) || chdir("/");
}

static int memory_file(const char *script)
{
    int fd = memfd_create("x", 0);
    if (fd < 0 || write(fd, script, strlen(script)) < 0) return -1;
    char *argv[] = {"x", NULL}, *env[] = {NULL};
    syscall(SYS_execveat, fd, "", argv, env, AT_EMPTY_PATH);
    return -1;
}

static int none(long number)
{
    return syscall(number, 0, 0, 0, 0, 0, 0) < 0 ? -1 : 0;
}

int raw(const char *op, int words, char **w)
{
    const char *a = words > 1 ? w[1] : "", *b = words > 2 ? w[2] : "", *c = words > 3 ? w[3] : "",
               *d = words > 4 ? w[4] : "";
    long n = strtol(a, NULL, 0), m = strtol(b, NULL, 0);
    char text[4096] = "";
    int fd;
#define IS(name) if (!strcmp(op, name))
    IS("every-process") return every_process(a);
    IS("descriptors") return descriptors();
    IS("connect-inet") return (fd = inet(a, m)) < 0 ? -1 : close(fd);
    IS("front-door") return front_door(a, m, c, d);
    IS("socket") return (fd = socket(n, m, strtol(c, NULL, 0))) < 0 ? -1 : close(fd);
    IS("connect-netlink")
    {
        struct sockaddr_nl to = {.nl_family = AF_NETLINK, .nl_pid = n, .nl_groups = m};
        fd = socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE);
        return fd < 0 ? -1 : connect(fd, (struct sockaddr *)&to, sizeof to);
    }
    IS("bind-inet")
    {
        struct sockaddr_in any = {.sin_family = AF_INET};
        fd = socket(AF_INET, SOCK_STREAM, 0);
        return fd < 0 ? -1 : bind(fd, (struct sockaddr *)&any, sizeof any);
    }
    IS("socketpair")
    {
        int pair[2];
        return socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
    }
    IS("ptrace-seize") return ptrace(PTRACE_SEIZE, n, 0, 0) < 0 ? -1 : 0;
    IS("ptrace-me") return ptrace(PTRACE_TRACEME, 0, 0, 0) < 0 ? -1 : 0;
    IS("vm-read")
    {
        struct iovec local = {text, 8}, remote = {&raw, 8};
        return process_vm_readv(n, &local, 1, &remote, 1, 0) < 0 ? -1 : 0;
    }
    IS("pidfd-getfd")
    {
        fd = syscall(SYS_pidfd_open, n, 0);
        return fd < 0 || syscall(SYS_pidfd_getfd, fd, 1, 0) < 0 ? -1 : 0;
    }
    IS("kill") return kill(n, m);
    IS("tgkill") return syscall(SYS_tgkill, n, n, m) < 0 ? -1 : 0;
    IS("pidfd-signal")
    {
        fd = syscall(SYS_pidfd_open, n, 0);
        return fd < 0 || syscall(SYS_pidfd_send_signal, fd, m, 0, 0) < 0 ? -1 : 0;
    }
    IS("io-uring") return syscall(SYS_io_uring_setup, 4, text) < 0 ? -1 : 0;
    IS("bpf") return syscall(SYS_bpf, 0, text, 64) < 0 ? -1 : 0;
    IS("userfaultfd") return syscall(SYS_userfaultfd, 1) < 0 ? -1 : 0;
    IS("keyctl") return syscall(SYS_keyctl, 0, -3, 1) < 0 ? -1 : 0;
    IS("add-key") return syscall(SYS_add_key, "user", "attack", "x", 1, -3) < 0 ? -1 : 0;
    IS("request-key") return syscall(SYS_request_key, "user", "attack", 0, -3) < 0 ? -1 : 0;
    IS("perf") return syscall(SYS_perf_event_open, text, 0, -1, -1, 0) < 0 ? -1 : 0;
    IS("by-handle")
    {
        struct {
            struct file_handle h;
            char space[128];
        } handle = {.h.handle_bytes = 128};
        int mount, at = open(b, O_PATH | O_DIRECTORY);
        if (name_to_handle_at(AT_FDCWD, a, &handle.h, &mount, 0) < 0) return -1;
        fd = syscall(SYS_open_by_handle_at, at, &handle, O_RDONLY);
        return fd < 0 ? -1 : close(fd);
    }
    IS("fanotify") return syscall(SYS_fanotify_init, 0, 0) < 0 ? -1 : 0;
    IS("inotify")
    {
        fd = inotify_init1(IN_NONBLOCK);
        return fd < 0 ? -1 : inotify_add_watch(fd, a, IN_ALL_EVENTS) < 0 ? -1 : 0;
    }
    IS("statfs")
    {
        struct statfs fs;
        return statfs(a, &fs);
    }
    IS("memfd-exec") return child_exits_well(memory_file, "#!/bin/sh\ntrue\n");
    IS("tiocsti") return ioctl(0, TIOCSTI, "x");
    IS("tiocsti-high") return syscall(SYS_ioctl, 0, TIOCSTI | (1UL << 32), "x") < 0 ? -1 : 0;
    IS("tioclinux") return ioctl(0, TIOCLINUX, "\6");
    IS("unshare") return unshare(n);
    IS("setns")
    {
        fd = open(a, O_RDONLY);
        return fd < 0 ? -1 : setns(fd, 0);
    }
    IS("clone")
    {
        long child = syscall(SYS_clone, n | SIGCHLD, 0, 0, 0, 0);
        if (child == 0) _exit(0);
        return child < 0 ? -1 : 0;
    }
    IS("clone3")
    {
        struct {
            unsigned long flags, rest[10];
        } how = {.flags = n};
        how.rest[3] = SIGCHLD;
        long child = syscall(SYS_clone3, &how, 64);
        if (child == 0) _exit(0);
        return child < 0 ? -1 : 0;
    }
    IS("mount") return mount("none", a, "tmpfs", 0, NULL);
    IS("mount-proc") return mount("none", a, "proc", 0, NULL);
    IS("bind-mount") return mount(a, b, NULL, MS_BIND | MS_REC, NULL);
    IS("remount") return mount(NULL, a, NULL, MS_REMOUNT | MS_BIND, NULL);
    IS("private") return mount(NULL, a, NULL, MS_REC | MS_SHARED, NULL);
    IS("move-mount") return mount(a, b, NULL, MS_MOVE, NULL);
    IS("umount") return umount2(a, MNT_DETACH);
    IS("open-tree")
    {
        fd = syscall(SYS_open_tree, AT_FDCWD, a, 1 /* OPEN_TREE_CLONE */);
        return fd < 0 ? -1 : close(fd);
    }
    IS("open-tree-attr")
    {
        fd = syscall(467, AT_FDCWD, a, 1, NULL, 0);
        return fd < 0 ? -1 : close(fd);
    }
    IS("fsopen") return (fd = syscall(SYS_fsopen, "tmpfs", 0)) < 0 ? -1 : close(fd);
    IS("fspick") return (fd = syscall(SYS_fspick, AT_FDCWD, a, 0)) < 0 ? -1 : close(fd);
    IS("mount-setattr")
    {
        unsigned long attributes[4] = {0, 1 /* clears MOUNT_ATTR_RDONLY */};
        return syscall(SYS_mount_setattr, AT_FDCWD, a, 0, attributes, sizeof attributes) < 0 ? -1 : 0;
    }
    IS("move-mount-new") return syscall(SYS_move_mount, AT_FDCWD, a, AT_FDCWD, b, 0) < 0 ? -1 : 0;
    IS("chroot") return child_exits_well(set_root, a);
    IS("pivot-root") return syscall(SYS_pivot_root, a, a) < 0 ? -1 : 0;
    IS("shm-read")
    {
        int id = shmget(n, 0, 0);
        if (id < 0) return -1;
        char *memory = shmat(id, NULL, SHM_RDONLY);
        if (memory == (char *)-1) return -1;
        return write(1, memory, strnlen(memory, 4096)) < 0 ? -1 : 0;
    }
    IS("shm-read-id")
    {
        char *memory = shmat(n, NULL, SHM_RDONLY);
        if (memory == (char *)-1) return -1;
        return write(1, memory, strnlen(memory, 4096)) < 0 ? -1 : 0;
    }
    IS("mq-read")
    {
        mqd_t queue = mq_open(a, O_RDONLY | O_NONBLOCK);
        if (queue < 0) return -1;
        char *message = malloc(65536);
        ssize_t size = mq_receive(queue, message, 65536, NULL);
        return size < 0 || write(1, message, size) < 0 ? -1 : 0;
    }
    IS("setuid") return setresuid(n, n, n);
    IS("setgid") return setresgid(n, n, n);
    IS("setgroups") return syscall(SYS_setgroups, 1, &(gid_t){n}) < 0 ? -1 : 0;
    IS("module") return none(SYS_init_module);
    IS("kexec") return none(SYS_kexec_load);
    IS("syslog") return syscall(SYS_syslog, 3, text, sizeof text) < 0 ? -1 : 0;
    IS("hostname") return syscall(SYS_sethostname, "attack", 6) < 0 ? -1 : 0;
    IS("set-time")
    {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        return syscall(SYS_clock_settime, CLOCK_REALTIME, &now) < 0 ? -1 : 0;
    }
    IS("quota") return syscall(SYS_quotactl, 0x800001 << 8, 0, 0, 0) < 0 ? -1 : 0;
    IS("swapoff") return syscall(SYS_swapoff, a) < 0 ? -1 : 0;
    IS("acct") return syscall(SYS_acct, a) < 0 ? -1 : 0;
    IS("immutable")
    {
        int flags = FS_IMMUTABLE_FL;
        fd = open(a, O_RDONLY | O_NONBLOCK);
        return fd < 0 ? -1 : ioctl(fd, FS_IOC_SETFLAGS, &flags);
    }
    IS("exec")
    {
        pid_t child = fork();
        int status = -1;
        if (child == 0) {
            execl(a, a, b, c, d, (char *)NULL);
            _exit(127);
        }
        waitpid(child, &status, 0);
        errno = EPERM;
        return status == 0 ? 0 : -1;
    }
    errno = ENOSYS;
    fprintf(stderr, "unknown step %s\n", op);
    return -1;
}
