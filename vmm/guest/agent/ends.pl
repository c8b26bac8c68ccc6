# Signals to jobs, their timeouts, and how they end.

sub signal_job {
    my ($job, $number) = @_;
    return if $job->{left};    # it has ended
    my $group = $job->{pid};
    if ($job->{terminal}) {
        my $front = pack 'i', 0;
        $group = unpack 'i', $front if ioctl($job->{terminal}, 0x540F, $front) && unpack('i', $front) > 0;
    }
    kill $number, -$group or kill $number, $job->{pid};
}

# Process ids of all that belongs to the job: its cgroup, or else its session.
sub members {
    my ($job) = @_;
    return split /\n/, read_file("$job->{cgroup}/cgroup.procs") if $job->{cgroup};
    return grep {
        my ($session) = read_file("/proc/$_/stat") =~ /.*\) \S+ \S+ \S+ (\d+)/s;
        defined $session && $session == $job->{pid};
    } grep { /^\d+$/ } names_in('/proc');
}

# The timeout is over, or the time after it.
sub job_due {
    my ($job) = @_;
    if (!$job->{timed_out}) {
        $job->{timed_out} = 1;
        $job->{kill_at} = now() + KILL_AFTER;
        set_timer($job, $job->{kill_at}, sub { job_due($job) });
        kill 'TERM', members($job);
        kill 'CONT', members($job);
    } elsif ($job->{kill_at} && now() >= $job->{kill_at}) {
        delete $job->{kill_at};
        write_file("$job->{cgroup}/cgroup.kill", '1') if $job->{cgroup};
        kill 'KILL', members($job);
    }
    finish_job($job);
}

sub reap {
    my ($signals) = @_;
    sysread $signals, my $ignored, 4096;
    while ((my $pid = waitpid -1, 1) > 0) {
        my $job = $jobs{$pid} or next;
        delete $jobs{$pid};
        @$job{qw(ended grace_until)} = ($?, now() + GRACE);
        $jobs{"$pid ended " . ++$job_number} = $job;    # the number may be another job's soon
        for my $name (keys %{ $job->{stream} }) {       # what it has written is handed over, however long that takes
            my $bytes = pack 'i', 0;
            $job->{left}{$name} = ioctl($job->{stream}{$name}, FIONREAD, $bytes) ? unpack('i', $bytes) : 0;
        }
        $job->{left} //= {};
        clear_timer($job) unless $job->{kill_at};
        finish_job($job);
    }
}

# Tells the host once the process has ended and its output is handed over. Output of processes it left is read on, so
# that they do not get SIGPIPE.
sub finish_job {
    my ($job) = @_;
    return if !$job->{left} || $job->{starting};
    my $port = $job->{port};
    if ($job->{kill_at} && members($job)) {
        my $soon = now() + 0.05;
        set_timer($job, $soon < $job->{kill_at} ? $soon : $job->{kill_at}, sub { job_due($job) });
        return;
    }
    clear_timer($job);
    if ($port && keys %{ $job->{stream} }) {
        return if grep { $job->{left}{$_} > 0 } keys %{ $job->{stream} };
        if (now() < $job->{grace_until}) {
            set_timer($job, $job->{grace_until}, sub { finish_job($job) });
            return;
        }
    }
    if ($port) {
        leave_session($job);
        my ($code, $signal) = ($job->{ended} >> 8, $job->{ended} & 127);
        reply($port, 'ENDED', pack 'C3', $code, $signal, $job->{timed_out} ? 1 : 0);
    }
    close_stdin($job);
    if (!keys %{ $job->{stream} }) {
        delete $jobs{$_} for grep { $jobs{$_} == $job } keys %jobs;
    }
}

sub leave_session {
    my ($job) = @_;
    my $port = delete $job->{port} or return;
    delete $port->{job};
    resume_output($job);
}
