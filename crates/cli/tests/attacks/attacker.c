/*
 * The attacker: runs inside a sandbox and does what its arguments say.
 *
 * Each argument is one step, its words separated by spaces. Every step is tried, whatever became of
 * the ones before; "#N ok" or "#N errno" follows what it could read. Nothing waits: pipes and
 * terminals are opened without blocking.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/fs.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#include "attacker.h"

static int say(const char *text, size_t size)
{
    while (size > 0) {
        ssize_t n = write(1, text, size);
        if (n <= 0) return -1;
        text += n;
        size -= n;
    }
    return 0;
}

/* Prints what a descriptor holds. */
static int tell(int fd)
{
    char text[4096];
    ssize_t n, all = 0;
    if (fd < 0) return -1;
    while (all < 65536 && (n = read(fd, text, sizeof text)) > 0) {
        say(text, n);
        all += n;
    }
    int failed = n < 0 ? -1 : 0;
    int was = errno;
    close(fd);
    errno = was;
    return failed;
}

static int put(int fd, const char *text)
{
    if (fd < 0) return -1;
    int failed = write(fd, text, strlen(text)) < 0 ? -1 : 0;
    int was = errno;
    close(fd);
    errno = was;
    return failed;
}

static int done(int fd)
{
    if (fd < 0) return -1;
    close(fd);
    return 0;
}

static int list(const char *path)
{
    DIR *dir = opendir(path);
    if (!dir) return -1;
    for (struct dirent *e; (e = readdir(dir));) {
        say(e->d_name, strlen(e->d_name));
        say("\n", 1);
    }
    closedir(dir);
    return 0;
}

static int unix_socket(const char *path, int connecting)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (fd < 0) return -1;
    /* "@name" is an abstract one. */
    strncpy(to.sun_path, path, sizeof to.sun_path - 1);
    socklen_t size = offsetof(struct sockaddr_un, sun_path) + strlen(to.sun_path) + 1;
    if (path[0] == '@') {
        to.sun_path[0] = 0;
        size -= 1;
    }
    if ((connecting ? connect : bind)(fd, (struct sockaddr *)&to, size) < 0) {
        int was = errno;
        close(fd);
        errno = was;
        return -1;
    }
    return connecting ? put(fd, "reached") : done(fd);
}

/* Opens through an O_PATH descriptor, by its name in /proc. */
static int reopen(const char *path, int flags)
{
    char name[64];
    int fd = open(path, O_PATH | O_CLOEXEC);
    if (fd < 0) return -1;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    int again = open(name, flags | O_NONBLOCK | O_CLOEXEC);
    int was = errno;
    close(fd);
    errno = was;
    return again;
}

static int open_at(const char *directory, const char *name, int flags)
{
    int fd = open(directory, O_PATH | O_CLOEXEC);
    if (fd < 0) return -1;
    int found = openat(fd, name, flags | O_NONBLOCK | O_CLOEXEC, 0644);
    int was = errno;
    close(fd);
    errno = was;
    return found;
}

static int copy(const char *from, const char *to)
{
    int in = open(from, O_RDONLY | O_NONBLOCK), out = open(to, O_WRONLY | O_CREAT | O_NONBLOCK, 0644);
    int failed = in < 0 || out < 0 || copy_file_range(in, NULL, out, NULL, 65536, 0) < 0 ? -1 : 0;
    int was = errno;
    if (in >= 0) close(in);
    if (out >= 0) close(out);
    errno = was;
    return failed;
}

static int temporary(const char *directory, const char *name, const char *text)
{
    char from[64];
    int fd = open(directory, O_TMPFILE | O_WRONLY, 0644);
    if (fd < 0 || write(fd, text, strlen(text)) < 0) return -1;
    snprintf(from, sizeof from, "/proc/self/fd/%d", fd);
    int failed = linkat(AT_FDCWD, from, AT_FDCWD, name, AT_SYMLINK_FOLLOW);
    int was = errno;
    close(fd);
    errno = was;
    return failed;
}

/* Reads and writes through a name while a child exchanges two others for each other. */
static int race(int rounds, const char *one, const char *other, const char *name, const char *text)
{
    pid_t swapper = fork();
    if (swapper < 0) return -1;
    if (swapper == 0) {
        for (int i = 0; i < rounds * 4; i++)
            syscall(SYS_renameat2, AT_FDCWD, one, AT_FDCWD, other, RENAME_EXCHANGE);
        _exit(0);
    }
    for (int i = 0; i < rounds; i++) {
        tell(open(name, O_RDONLY | O_NONBLOCK));
        put(open(name, O_WRONLY | O_APPEND | O_NONBLOCK), text);
        chmod(name, 0777);
    }
    return waitpid(swapper, NULL, 0) < 0 ? -1 : 0;
}

static int flags_of(const char *mode)
{
    if (!strcmp(mode, "r")) return O_RDONLY;
    if (!strcmp(mode, "rw")) return O_RDWR;
    if (!strcmp(mode, "w")) return O_WRONLY;
    if (!strcmp(mode, "t")) return O_WRONLY | O_TRUNC;
    return O_WRONLY | O_CREAT;
}

/* The descriptor for the rest of the run that `lock` and `keep` use. */
static int kept = -1;

static int step(int words, char **w)
{
    const char *op = w[0], *a = words > 1 ? w[1] : "", *b = words > 2 ? w[2] : "",
               *c = words > 3 ? w[3] : "";
    long n = strtol(a, NULL, 0);
    long mode = strtol(a, NULL, 8);
    struct stat st;
    char text[4096];
#define IS(name) if (!strcmp(op, name))
    IS("read") return tell(open(a, O_RDONLY | O_NONBLOCK));
    IS("write") return put(open(a, O_WRONLY | O_CREAT | O_NONBLOCK, 0644), b);
    IS("append") return put(open(a, O_WRONLY | O_APPEND | O_NONBLOCK), b);
    IS("truncate") return truncate(a, n = strtol(b, NULL, 0));
    IS("open") return done(open(a, flags_of(b) | O_NONBLOCK, 0644));
    IS("create") return done(open(b, O_CREAT | O_WRONLY | O_NONBLOCK, mode));
    IS("mkdir") return mkdir(a, 0755);
    IS("mkdir-mode") return mkdir(b, mode);
    IS("rmdir") return rmdir(a);
    IS("rename") return rename(a, b);
    IS("exchange")
        return syscall(SYS_renameat2, AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE);
    IS("symlink") return symlink(a, b);
    IS("link") return link(a, b);
    IS("link-follow") return linkat(AT_FDCWD, a, AT_FDCWD, b, AT_SYMLINK_FOLLOW);
    IS("unlink") return unlink(a);
    IS("chmod") return chmod(b, mode);
    IS("fchmod")
    {
        int fd = open(b, O_RDONLY | O_NONBLOCK);
        if (fd < 0) return -1;
        return fchmod(fd, mode) | done(fd);
    }
    IS("fchmodat2")
    {
        int fd = open(b, O_PATH | O_NOFOLLOW);
        if (fd < 0) return -1;
        long r = syscall(452, fd, "", mode, AT_EMPTY_PATH);
        int was = errno;
        close(fd);
        errno = was;
        return r;
    }
    IS("chmod-fd") return fchmod(n, strtol(b, NULL, 8));
    IS("read-fd") return tell(dup(n));
    IS("write-fd") return write(n, b, strlen(b)) < 0 ? -1 : 0;
    IS("truncate-fd") return ftruncate(n, 0);
    IS("chown") return chown(c, n, strtol(b, NULL, 0));
    IS("lchown") return lchown(c, n, strtol(b, NULL, 0));
    IS("utimes")
    {
        struct timespec times[2] = {{1, 0}, {1, 0}};
        return utimensat(AT_FDCWD, a, times, 0);
    }
    IS("touch") return utimensat(AT_FDCWD, a, NULL, 0);
    IS("setxattr") return setxattr(a, "user.attack", "x", 1, 0);
    IS("mkfifo") return mkfifo(a, 0644);
    IS("mknod") return mknod(b, S_IFREG | mode, 0);
    IS("mknod-block") return mknod(a, S_IFBLK | 0666, 0xfe00);
    IS("mknod-char") return mknod(a, S_IFCHR | 0666, 0x0103);
    IS("bind-unix") return unix_socket(a, 0);
    IS("connect-unix") return unix_socket(a, 1);
    IS("chdir") return chdir(a);
    IS("temporary") return temporary(a, b, c);
    IS("lock")
    {
        kept = open(a, O_RDONLY | O_NONBLOCK);
        return kept < 0 ? -1 : flock(kept, LOCK_EX | LOCK_NB);
    }
    IS("lease")
    {
        kept = open(a, O_RDONLY | O_NONBLOCK);
        return kept < 0 ? -1 : fcntl(kept, F_SETLEASE, F_RDLCK);
    }
    IS("list") return list(a);
    IS("stat")
    {
        if (stat(a, &st) < 0) return -1;
        return say(text, snprintf(text, sizeof text, "size=%ld mtime=%ld\n", (long)st.st_size, (long)st.st_mtime));
    }
    IS("readlink")
    {
        ssize_t size = readlink(a, text, sizeof text);
        return size < 0 ? -1 : say(text, size);
    }
    IS("copy") return copy(a, b);
    IS("read-at") return tell(open_at(a, b, O_RDONLY));
    IS("write-at") return put(open_at(a, b, O_WRONLY | O_CREAT), c);
    IS("reopen-read") return tell(reopen(a, O_RDONLY));
    IS("reopen-write") return put(reopen(a, O_WRONLY), b);
    IS("fallocate")
    {
        int fd = open(a, O_WRONLY | O_NONBLOCK);
        if (fd < 0) return -1;
        return fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) | done(fd);
    }
    IS("race") return words < 6 ? -1 : race(n, b, c, w[4], w[5]);
    IS("say") return say(a, strlen(a));
    IS("wait") return read(0, text, 1) < 0 ? -1 : 0;
    return raw(op, words, w);
}

/* Executes a program, and all it starts, as on a kernel without Landlock. */
static int without_landlock(char **argv)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 444, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {4, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        return 1;
    execvp(argv[0], argv);
    return 1;
}

int main(int argc, char **argv)
{
    umask(022);
    if (argc > 2 && !strcmp(argv[1], "--without-landlock")) return without_landlock(argv + 2);
    for (int i = 1; i < argc; i++) {
        char *words[16];
        int count = 0;
        char said[64];
        for (char *word = strtok(argv[i], " "); word && count < 16; word = strtok(NULL, " "))
            words[count++] = word;
        /* A unit separator stands for a space inside of a word. */
        for (int j = 0; j < count; j++)
            for (char *at = words[j]; (at = strchr(at, '\037'));) *at = ' ';
        if (count == 0) continue;
        errno = 0;
        int failed = step(count, words);
        if (failed)
            say(said, snprintf(said, sizeof said, "\n#%d %d\n", i, errno ? errno : 255));
        else
            say(said, snprintf(said, sizeof said, "\n#%d ok\n", i));
    }
    return 0;
}
