# Jobs: how they are made.

sub start_job {
    my ($port, @fields) = @_;
    my (@arguments, %environment, %option);
    while (my ($tag, $value) = splice @fields, 0, 2) {
        if ($tag eq 'a') {
            push @arguments, $value;
        } elsif ($tag eq 'e') {
            my ($name, $text) = split /=/, $value, 2;
            $environment{$name} = $text if length $name && defined $text;
        } else {
            $option{$tag} = $value;
        }
    }
    @arguments or die "no program was given\n";
    my $job = { stdin_queue => [], stdin_sent => 0, credit => 0 };
    my (@inner, $status);
    if (defined $option{w}) {
        @inner = (open_terminal($job, $option{w})) x 3;
    } else {
        if (defined $option{i}) {
            ($inner[0], $job->{stdin}) = new_pipe();
        } else {
            open $inner[0], '<', '/dev/null' or die "/dev/null: $!\n";
        }
        ($job->{stream}{STDOUT}, $inner[1]) = new_pipe();
        ($job->{stream}{STDERR}, $inner[2]) = new_pipe();
    }
    ($job->{starting}, $status) = new_pipe();
    if ($cgroups && $option{t}) {
        rmdir JOBS . "/$_" for grep { /^job-/ } names_in(JOBS);    # of jobs whose last process is gone
        $job->{cgroup} = JOBS . '/job-' . ++$job_number;
        mkdir $job->{cgroup} or delete $job->{cgroup};
    }
    my $pid = new_process($job);
    if ($pid == 0) {
        my $code = 125;
        eval { become($job, \@inner, \@arguments, \%environment, \%option, \$code) };
        syswrite $status, "$code $@";
        syscall(SYS_exit_group, 1);
    }
    nonblocking($_) for grep { $_ } $job->{starting}, $job->{stdin}, values %{ $job->{stream} };
    @$job{qw(pid port)} = ($pid, $port);
    $jobs{$pid} = $port->{job} = $job;
    set_timer($job, now() + $option{t} / 1000, sub { job_due($job) }) if $option{t};
    watch($job->{starting}, EPOLLIN, sub { job_started($job) });
    for my $name (keys %{ $job->{stream} }) {
        watch($job->{stream}{$name}, EPOLLIN, sub { read_stream($job, $name) });
    }
}

# As fork does, in the job's cgroup, or in that of all, from its first moment: to move it there later waits for all
# processors.
sub new_process {
    my ($job) = @_;
    my ($cgroup, $own) = $cgroups;
    $cgroup = sysopen($own, $job->{cgroup}, O_RDONLY) ? $own : undef if $job->{cgroup};
    if ($cgroup) {
        my $arguments = pack 'Q11', CLONE_INTO_CGROUP, 0, 0, 0, SIGCHLD, 0, 0, 0, 0, 0, fileno $cgroup;
        my $pid = syscall(SYS_clone3, $arguments, length $arguments);
        return $pid if $pid >= 0;
        die "clone3: $!\n" if $! == EAGAIN;    # jobs have all process ids that they may
    }
    rmdir delete $job->{cgroup} if $job->{cgroup};    # the job is its session, then
    return fork // die "fork: $!\n";
}

sub new_pipe {
    pipe my $reader, my $writer or die "pipe: $!\n";
    return ($reader, $writer);
}

sub open_terminal {
    my ($job, $window) = @_;
    my $path = ($root eq '/' ? '' : $root) . '/dev/pts/ptmx';
    sysopen my $outside, $path, O_RDWR | O_NOCTTY or die "no terminal: $path: $!\n";
    my $unlocked = pack 'i', 0;
    ioctl $outside, TIOCSPTLCK, $unlocked or die "no terminal: $!\n";
    my $descriptor = ioctl($outside, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC) or die "no terminal: $!\n";
    open my $inside, '+<&=', $descriptor + 0 or die "no terminal: $!\n";
    set_window($outside, $window);
    open $job->{stdin}, '+<&', $outside or die "no terminal: $!\n";
    $job->{terminal} = $job->{stream}{STDOUT} = $outside;
    return $inside;
}

sub set_window {
    my ($terminal, $size) = @_;
    ioctl $terminal, TIOCSWINSZ, pack 'S4', unpack('n2', $size), 0, 0;
}
