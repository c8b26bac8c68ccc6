# What goes into jobs and comes out of them.

sub job_started {
    my ($job) = @_;
    my $count = sysread $job->{starting}, $job->{failure}, 8192, length($job->{failure} //= '');
    return if !defined $count || $count > 0;
    unwatch($job->{starting});
    close delete $job->{starting};
    if (my ($code, $text) = $job->{failure} =~ /^(\d+) (.*)/s) {
        my $port = $job->{port};
        leave_session($job);
        refuse($port, $code, $text) if $port;
        close_stream($job, $_) for keys %{ $job->{stream} };
    } else {
        reply($job->{port}, 'STARTED', pack 'N', $job->{pid}) if $job->{port};
        write_stdin($job) if $job->{stdin};
    }
    finish_job($job);
}

sub read_stream {
    my ($job, $name) = @_;
    my $frame = "\0" x 4;    # the frame is made where the bytes are read: copies are what output costs
    my $count = sysread $job->{stream}{$name}, $frame, PAYLOAD, 4;
    return if !defined $count && ($! == EAGAIN || $! == EINTR);
    if (!$count) {    # the end; EIO of a terminal
        close_stream($job, $name);
        return finish_job($job);
    }
    $job->{left}{$name} -= $count if $job->{left};
    if (my $port = $job->{port}) {
        substr $frame, 0, 4, pack 'C x n', $KIND{$name}, $count;
        $frame .= $port->{host_nonce};
        put($port, $frame);
        if ($port->{out_bytes} >= OUTGOING_HIGH) {
            unwatch($job->{stream}{$name});
            $job->{paused}{$name} = 1;
        }
    }
    finish_job($job) if $job->{left};
}

sub resume_output {
    my ($job) = @_;
    for my $name (keys %{ $job->{paused} }) {
        delete $job->{paused}{$name};
        watch($job->{stream}{$name}, EPOLLIN, sub { read_stream($job, $name) });
    }
}

sub close_stream {
    my ($job, $name) = @_;
    my $file = delete $job->{stream}{$name} or return;
    unwatch($file) unless delete $job->{paused}{$name};
    close $file;
}

# The job gets SIGPIPE when it writes there; SIGHUP when that was its terminal.
sub read_no_more {
    my ($job, $name) = @_;
    close_stdin($job) if $job->{terminal};
    close_stream($job, $name);
    finish_job($job);
}

sub give_stdin {
    my ($job, $bytes) = @_;
    return unless $job->{stdin};
    if ($job->{terminal} && !length $bytes) {    # the key for it; after an unfinished line, the first only ends that
        $bytes = ($job->{last} // "\n") =~ /[\r\n]\z/ ? "\4" : "\4\4";
    }
    $job->{last} = $bytes;
    push @{ $job->{stdin_queue} }, $bytes;
    write_stdin($job);
}

sub write_stdin {
    my ($job) = @_;
    my $queue = $job->{stdin_queue};
    return if $job->{terminal} && $job->{starting};    # keys that signal need a process in front
    while (@$queue) {
        return close_stdin($job) if !length $queue->[0];
        my $count = syswrite $job->{stdin}, $queue->[0], length($queue->[0]) - $job->{stdin_sent}, $job->{stdin_sent};
        if (!defined $count) {
            next if $! == EINTR;
            return close_stdin($job) if $! != EAGAIN;    # the job reads no more, and the host gets no more credit
            watch($job->{stdin}, EPOLLOUT, sub { write_stdin($job) });
            last;
        }
        $job->{stdin_sent} += $count;
        $job->{credit} += $count;
        next if $job->{stdin_sent} < length $queue->[0];
        shift @$queue;
        $job->{stdin_sent} = 0;
    }
    unwatch($job->{stdin}) if !@$queue;
    if ($job->{port} && $job->{credit} && (!@$queue || $job->{credit} >= STDIN_CREDIT)) {
        reply($job->{port}, 'CREDIT', pack 'N', $job->{credit});
        $job->{credit} = 0;
    }
}

sub close_stdin {
    my ($job) = @_;
    my $file = delete $job->{stdin} or return;
    unwatch($file);
    close $file;
    $job->{stdin_queue} = [];
}
