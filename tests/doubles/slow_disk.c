/* Preloaded into a server: fsync and fdatasync take as many seconds as the file $SLOW_DISK/seconds says, and a write
   to a file that is being synced waits for that, as it does on a busy disk. Each sync adds a byte to $SLOW_DISK/begun
   when it begins, to $SLOW_DISK/slow as well if it takes longer for that file, and to $SLOW_DISK/ended when it ends. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define MAX_FILES 4096

typedef int (*sync_function)(int);
typedef ssize_t (*write_function)(int, const void *, size_t);

static int syncing[MAX_FILES];

static ssize_t write_at_once(int fd, const void *data, size_t size)
{
    static write_function function;
    if (!function)
        function = (write_function)dlsym(RTLD_NEXT, "write");
    return function(fd, data, size);
}

static int open_beside(const char *name, int flags)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("SLOW_DISK"), name);
    return open(path, flags | O_CLOEXEC, 0600);
}

static void count(const char *name)
{
    int fd = open_beside(name, O_WRONLY | O_CREAT | O_APPEND);
    if (fd < 0 || write_at_once(fd, ".", 1) != 1)
        abort();
    close(fd);
}

static double seconds(void)
{
    char text[32] = {0};
    int fd = open_beside("seconds", O_RDONLY);
    if (fd < 0 || read(fd, text, sizeof text - 1) < 0)
        abort();
    close(fd);
    return atof(text);
}

static int slowly(const char *name, int fd)
{
    double wait_s = seconds();
    struct timespec wait = {(time_t)wait_s, (long)((wait_s - (time_t)wait_s) * 1e9)};
    int known = fd >= 0 && fd < MAX_FILES, result;
    if (known)
        __atomic_add_fetch(&syncing[fd], 1, __ATOMIC_SEQ_CST);
    count("begun");
    if (wait_s > 0)
        count("slow");
    nanosleep(&wait, NULL);
    result = ((sync_function)dlsym(RTLD_NEXT, name))(fd);
    count("ended");
    if (known)
        __atomic_sub_fetch(&syncing[fd], 1, __ATOMIC_SEQ_CST);
    return result;
}

int fsync(int fd) { return slowly("fsync", fd); }

int fdatasync(int fd) { return slowly("fdatasync", fd); }

ssize_t write(int fd, const void *data, size_t size)
{
    struct timespec moment = {0, 1000000};
    while (fd >= 0 && fd < MAX_FILES && __atomic_load_n(&syncing[fd], __ATOMIC_SEQ_CST))
        nanosleep(&moment, NULL);
    return write_at_once(fd, data, size);
}
