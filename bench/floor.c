/* The least that a stage costs the kernel: `floor PART LOWER WORKSPACE DIR` prints the milliseconds of one /bin/true of
 * LOWER, from before its start until it is gone with all that was made for it.
 *
 * PART 0: vfork, exec, wait. 1: in a process that is the first of new namespaces. 2: that also mounts an overlay of
 * LOWER and one of WORKSPACE at /workspace, with writes below DIR, and /proc, /sys and /dev. No copy of memory, no
 * interpreter, no privileges dropped. Compiled and run by bench/floor.py. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int part;
static const char *lower, *workspace, *directory;

static void need(int failed, const char *what)
{
	if (failed) {
		perror(what);
		_exit(1);
	}
}

static const char *below(const char *name)
{
	static char paths[8][4096];
	static int next;
	char *path = paths[next++ % 8];
	snprintf(path, sizeof paths[0], "%s/%s", directory, name);
	return path;
}

static void overlay(const char *from, const char *upper, const char *work, const char *at, const char *options)
{
	char all[16384];
	snprintf(all, sizeof all, "lowerdir=%s,upperdir=%s,workdir=%s,volatile,%s", from, upper, work, options);
	need(mount("overlay", at, "overlay", MS_NODEV, all), "overlay");
}

static void root(void)
{
	need(mount("", "/", "", MS_REC | MS_PRIVATE, ""), "private");
	overlay(workspace, below("space"), below("space-work"), below("space"), "redirect_dir=on,index=on");
	int space = syscall(428 /* open_tree */, AT_FDCWD, below("space"), 1 | O_CLOEXEC);
	overlay(lower, below("upper"), below("work"), directory, "redirect_dir=nofollow,index=off");
	need(chdir(directory) || syscall(SYS_pivot_root, ".", ".") || umount2(".", MNT_DETACH) || chdir("/"), "root");
	mkdir("/workspace", 0755);
	need(syscall(429 /* move_mount */, space, "", AT_FDCWD, "/workspace", 4), "workspace");
	need(mount("proc", "/proc", "proc", MS_NOSUID, "") || mount("sysfs", "/sys", "sysfs", MS_RDONLY, "") ||
		     mount("tmpfs", "/dev", "tmpfs", MS_NOSUID, "mode=755"), "mounts");
}

static int run(void *unused)
{
	(void)unused;
	if (part == 2)
		root();
	pid_t child = vfork();
	if (child == 0) {
		if (part < 2 && chroot(lower))
			_exit(1);
		execl("/bin/true", "true", (char *)NULL);
		_exit(1);
	}
	int status;
	need(child < 0 || waitpid(child, &status, 0) != child || status, "true");
	return 0;
}

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

int main(int count, char **words)
{
	need(count != 5, "usage: floor PART LOWER WORKSPACE DIR");
	part = atoi(words[1]), lower = words[2], workspace = words[3], directory = words[4];
	const char *names[] = {"upper", "work", "space", "space-work"};
	for (int i = 0; i < 4; i++)
		need(mkdir(below(names[i]), 0755), names[i]);
	char *stack = malloc(1 << 16);
	int namespaces = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET | CLONE_NEWPID;
	int status = 0;
	double start = now();
	if (part == 0)
		run(NULL);
	else {
		pid_t first = clone(run, stack + (1 << 16), CLONE_VM | namespaces | SIGCHLD, NULL);
		need(first < 0 || waitpid(first, &status, 0) != first || status, "namespaces");
	}
	printf("%f\n", now() - start);
	return 0;
}
