#!/usr/bin/perl
# pVisor's agent in a guest: runs processes for the host and gives the guest its identity.
#
#   agent.pl [--machine] [--root DIR] [--ports COUNT] [fd:N...]
#
# vmm/guest/program.py joins the files of this directory into that program.
#
# Serves COUNT virtio-serial ports named pvisor.agent.*, or the given descriptors. Processes run chrooted in DIR. With
# --machine it may change the machine: clock, generator, hostname, addresses, power, and has a cgroup for its jobs, so that
# it can hold them still, with one in it for each that has a timeout.
# The protocol is described in docs/formats/agent.md. One process, one epoll, no modules but strict and warnings: it
# stays in memory for as long as the guest lives, and every page it touches costs each fork of the VM a copy.
use strict;
use warnings;

# Linux on x86-64.
sub SYS_rt_sigprocmask() { 14 }
sub SYS_dup2()           { 33 }
sub SYS_setsid()         { 112 }
sub SYS_setgroups()      { 116 }
sub SYS_setresuid()      { 117 }
sub SYS_setresgid()      { 119 }
sub SYS_sched_setscheduler() { 144 }
sub SYS_setrlimit()      { 160 }
sub SYS_sync()           { 162 }
sub SYS_mount()          { 165 }
sub SYS_sethostname()    { 170 }
sub SYS_clock_settime()  { 227 }
sub SYS_clock_gettime()  { 228 }
sub SYS_exit_group()     { 231 }
sub SYS_epoll_wait()     { 232 }
sub SYS_epoll_ctl()      { 233 }
sub SYS_signalfd4()      { 289 }
sub SYS_epoll_create1()  { 291 }
sub SYS_getrandom()      { 318 }
sub SYS_clone3()         { 435 }

sub EAGAIN() { 11 }
sub EINTR()  { 4 }
sub ENOENT() { 2 }
sub EEXIST() { 17 }

sub EPOLLIN()  { 1 }
sub EPOLLOUT() { 4 }
sub EPOLLET()  { 1 << 31 }

sub O_RDONLY()   { 0 }
sub O_RDWR()     { 2 }
sub O_NOCTTY()   { 0400 }
sub O_NONBLOCK() { 04000 }
sub O_CLOEXEC()  { 02000000 }
sub O_NEW()      { 01 | 0100 | 0200 | 0400000 }    # O_WRONLY O_CREAT O_EXCL O_NOFOLLOW
sub O_OLD()      { 01 | 04000 | 0400000 }          # O_WRONLY O_NONBLOCK O_NOFOLLOW
sub F_SETFD()    { 2 }
sub F_GETFL()    { 3 }
sub F_SETFL()    { 4 }

sub FIONREAD()          { 0x541B }
sub TIOCSCTTY()         { 0x540E }
sub TIOCSWINSZ()        { 0x5414 }
sub TIOCGPTPEER()       { 0x5441 }
sub TIOCSPTLCK()        { 0x40045431 }
sub RNDADDENTROPY()     { 0x40085203 }
sub RNDRESEEDCRNG()     { 0x5207 }
sub SIOCSIFHWADDR()     { 0x8924 }
sub CLOCK_REALTIME()    { 0 }
sub CLOCK_MONOTONIC()   { 1 }
sub CLONE_INTO_CGROUP() { 1 << 33 }
sub SIGCHLD()           { 17 }
sub REAL_TIME()         { 2 | 0x40000000 }    # SCHED_RR | SCHED_RESET_ON_FORK
sub CGROUP()            { '/cgroup' }
sub JOBS()              { '/cgroup/jobs' }

# The protocol; vmm/agentproto.py has the same.
sub VERSION()      { 1 }
sub HELLO()        { "\0\0\0\0pVisor hello" }
sub WELCOME()      { "\0\0\0\0pVisor agent" }
sub GREETING()     { 40 }
sub PAYLOAD()      { 32756 }
sub STDIN_CREDIT() { 16384 }
sub REQUEST_MAX()  { 16 << 20 }
my %KIND = (
    PING => 1, PART => 2, EXECUTE => 3, STDIN => 4, SIGNAL => 5, WINDOW => 6, CLOSE => 7, IDENTIFY => 8, SHUTDOWN => 9,
    HOLD => 10, LIST => 11, KILL => 12, PONG => 0x41, STARTED => 0x42, STDOUT => 0x43, STDERR => 0x44, CREDIT => 0x45, ENDED => 0x46, REFUSED => 0x47,
    DONE => 0x48, BEGUN => 0x49,
);

sub OUTGOING_HIGH() { 65536 }    # bytes queued for a port that make its job's output wait
sub HANG_UP_AFTER() { 0.1 }      # seconds without a host that end a session
sub KILL_AFTER()    { 2 }        # seconds from SIGTERM to SIGKILL at a timeout
sub GRACE()         { 0.1 }      # seconds that output of a job's remaining processes is waited for
sub STILL_WITHIN()  { 1 }        # seconds that processes are given to stand still
sub HOLD_AT_MOST()  { 5 }        # seconds after which held jobs go on by themselves
sub SPARE_IDS()     { 256 }      # process ids that jobs leave to the rest of the machine
sub PATH()          { '/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' }

my ($machine, $root, $port_count) = (0, '/', 0);
my (%ports, %jobs, %watched, %timers);    # by name, by process id, by descriptor, by owner
my $job_number = 0;
my ($epoll, $cgroups);
