# From the command line to the loop.

sub main {
    my @descriptors;
    while (defined(my $argument = shift @ARGV)) {
        if ($argument eq '--machine') {
            $machine = 1;
        } elsif ($argument eq '--root') {
            $root = shift @ARGV;
        } elsif ($argument eq '--ports') {
            $port_count = shift @ARGV;
        } elsif ($argument =~ /^fd:(\d+)$/) {
            push @descriptors, $1;
        } else {
            die "agent.pl: what is $argument?\n";
        }
    }
    $SIG{$_} = 'IGNORE' for qw(PIPE TERM HUP INT QUIT);    # a workload that ends everything does not end this
    chdir '/';
    umask 022;
    $epoll = syscall(SYS_epoll_create1, O_CLOEXEC);
    $epoll >= 0 or die "epoll_create1: $!\n";
    my $mask = pack 'Q', 1 << (SIGCHLD - 1);
    syscall(SYS_rt_sigprocmask, 0, $mask, 0, 8) == 0 or die "rt_sigprocmask: $!\n";
    my $descriptor = syscall(SYS_signalfd4, -1, $mask, 8, O_CLOEXEC | O_NONBLOCK);
    open my $signals, '+<&=', $descriptor or die "signalfd4: $!\n";
    watch($signals, EPOLLIN, sub { reap($signals) });
    if ($machine) {
        write_file('/proc/self/oom_score_adj', '-1000');
        mkdir CGROUP;
        my ($type, $path) = ('cgroup2', CGROUP);    # not constants: a system call could write to them
        syscall(SYS_mount, $type, $path, $type, 0, 0);    # once for all agents that this guest has
        my $existed = !mkdir JOBS;
        sysopen($cgroups, JOBS, O_RDONLY) && -e JOBS . '/cgroup.procs' or undef $cgroups;
        release() if $existed && $cgroups;    # what the agent before this one held
        keep_reach() if $cgroups;
    }
    for my $number (@descriptors) {
        open my $file, '+<&=', $number or die "fd $number: $!\n";
        nonblocking($file);
        fcntl $file, F_SETFD, 1 or die "fcntl: $!\n";
        add_port("fd:$number", $file);
        $ports{"fd:$number"}{alone} = 1;    # nobody can connect to it again
    }
    find_ports() if $port_count;
    run();
}

main();
