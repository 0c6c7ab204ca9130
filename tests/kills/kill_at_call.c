/* Preloaded into a process: kills it at one of its calls that change a file below a folder.

   kill_at_call(folder, number, fails): from now on count such calls, and at that number end by
   SIGKILL, or fail with an errno if `fails` is not 0; within a write, half of it is done first.
   calls_so_far() is their number. What is written below is only what has a path or a descriptor. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static long target, calls;
static int failure;

void kill_at_call(const char *folder, long number, int fails) {
    strncpy(root, folder, sizeof root - 1);
    target = number, calls = 0, failure = fails;
}
long calls_so_far(void) { return calls; }

static int below(const char *path) {
    char whole[2 * PATH_MAX], here[PATH_MAX];
    if (!root[0] || !path) return 0;
    if (path[0] == '/') return strncmp(path, root, strlen(root)) == 0;
    if (!getcwd(here, sizeof here)) return 0;
    snprintf(whole, sizeof whole, "%s/%s", here, path);
    return strncmp(whole, root, strlen(root)) == 0;
}
static int open_below(int fd) {
    char link[64], path[PATH_MAX];
    if (!root[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return below(path);
}
static int path_at(int dir, const char *path) {  /* rmtree works with descriptors */
    return path && path[0] == '/' ? below(path) : dir == AT_FDCWD ? below(path) : open_below(dir);
}
/* Whether this is the call; it does not return where the process is to end. */
static int strikes(int counts) {
    if (!counts || calls++ != target) return 0;
    if (failure) { errno = failure; return 1; }
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)
#define WRAP(result, name, parameters, arguments, counts) \
    result name parameters { REAL(name); if (strikes(counts)) return -1; return real arguments; }

static int opening(int dir, const char *path, int flags) {
    return (flags & (O_CREAT | O_WRONLY | O_RDWR)) && path_at(dir, path);
}
#define MODE va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest)
int open(const char *path, int flags, ...) {
    MODE; REAL(open);
    return strikes(opening(AT_FDCWD, path, flags)) ? -1 : real(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE; REAL(open64);
    return strikes(opening(AT_FDCWD, path, flags)) ? -1 : real(path, flags, mode);
}
int openat(int dir, const char *path, int flags, ...) {
    MODE; REAL(openat);
    return strikes(opening(dir, path, flags)) ? -1 : real(dir, path, flags, mode);
}
int openat64(int dir, const char *path, int flags, ...) {
    MODE; REAL(openat64);
    return strikes(opening(dir, path, flags)) ? -1 : real(dir, path, flags, mode);
}
ssize_t write(int fd, const void *data, size_t n) {
    REAL(write);
    if (open_below(fd) && calls == target && !failure && real(fd, data, n / 2) < 0) return -1;
    return strikes(open_below(fd)) ? -1 : real(fd, data, n);
}
WRAP(ssize_t, writev, (int fd, const struct iovec *v, int n), (fd, v, n), open_below(fd))
WRAP(ssize_t, pwrite64, (int fd, const void *d, size_t n, off64_t at), (fd, d, n, at),
     open_below(fd))
WRAP(int, fsync, (int fd), (fd), open_below(fd))
WRAP(int, ftruncate64, (int fd, off64_t n), (fd, n), open_below(fd))
WRAP(int, mkdir, (const char *p, mode_t m), (p, m), below(p))
WRAP(int, mkdirat, (int d, const char *p, mode_t m), (d, p, m), path_at(d, p))
WRAP(int, rename, (const char *a, const char *b), (a, b), below(a) || below(b))
WRAP(int, renameat, (int c, const char *a, int d, const char *b), (c, a, d, b),
     path_at(c, a) || path_at(d, b))
WRAP(int, renameat2, (int c, const char *a, int d, const char *b, unsigned f), (c, a, d, b, f),
     path_at(c, a) || path_at(d, b))
WRAP(int, link, (const char *a, const char *b), (a, b), below(b))
WRAP(int, symlink, (const char *a, const char *b), (a, b), below(b))
WRAP(int, unlink, (const char *p), (p), below(p))
WRAP(int, unlinkat, (int d, const char *p, int f), (d, p, f), path_at(d, p))
WRAP(int, rmdir, (const char *p), (p), below(p))
