/* Preloaded into gdb: lets versions before 14 write vector registers on processors with AMX.  Floor 0.
 *
 * Linux accepts a thread's extended registers only as a whole.  Those versions know a layout of 2696 bytes; with AMX it has
 * 11008, and each write fails.  gdb notices that in the middle of a call that it makes in the program, which then goes on with
 * wrong registers.  We repeat such a write on top of what the thread has. */
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <linux/ptrace.h>
#include <stdarg.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>

/* Declared here because <sys/ptrace.h> gives the first parameter an enumeration type in some C libraries. */
__attribute__((visibility("default"))) long ptrace(int request, ...);

typedef long (*ptrace_function)(int request, ...);

/* A single buffer will do: gdb calls this from one thread at a time. */
static char registers_whole[1 << 16];

static long
registers_write_whole(ptrace_function next, pid_t thread, const struct iovec *part) {
    void *kind = (void *)(long)NT_X86_XSTATE;
    struct iovec whole = {registers_whole, sizeof registers_whole};
    if (next(PTRACE_GETREGSET, thread, kind, &whole) != 0 || whole.iov_len <= part->iov_len) {
        return -1;
    }
    memcpy(registers_whole, part->iov_base, part->iov_len);
    return next(PTRACE_SETREGSET, thread, kind, &whole);
}

long
ptrace(int request, ...) {
    va_list rest;
    va_start(rest, request);
    const pid_t thread = va_arg(rest, pid_t);
    void *addr = va_arg(rest, void *);
    void *data = va_arg(rest, void *);
    va_end(rest);
    ptrace_function next = (ptrace_function)dlsym(RTLD_NEXT, "ptrace");
    const int before = errno;
    const long result = next(request, thread, addr, data);
    if (result != -1 || request != PTRACE_SETREGSET || (unsigned long)addr != NT_X86_XSTATE) {
        return result;
    }
    const int why = errno;
    const long again = registers_write_whole(next, thread, data);
    errno = again == 0 ? before : why;
    return again;
}
