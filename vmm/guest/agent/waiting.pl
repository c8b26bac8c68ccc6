# Waiting for descriptors and times, and calling what waits for them.

sub now {
    my $time = "\0" x 16;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, $time);
    my ($seconds, $nanoseconds) = unpack 'qq', $time;
    return $seconds + $nanoseconds / 1e9;
}

# Calls $callback while one of the events is there; EPOLLET: whenever something happened.
sub watch {
    my ($file, $events, $callback) = @_;
    my $descriptor = fileno $file;
    my $event = pack 'Lq', $events, $descriptor;
    syscall(SYS_epoll_ctl, $epoll, $watched{$descriptor} ? 3 : 1, $descriptor, $event) == 0 or die "epoll_ctl: $!\n";
    $watched{$descriptor} = [ $callback, $events ];
}

sub unwatch {
    my ($file) = @_;
    my $descriptor = fileno $file;
    return unless delete $watched{$descriptor};
    syscall(SYS_epoll_ctl, $epoll, 2, $descriptor, 0) == 0 or die "epoll_ctl: $!\n";
}

sub nonblocking {
    my ($file) = @_;
    my $flags = fcntl $file, F_GETFL, 0;
    fcntl $file, F_SETFL, $flags | O_NONBLOCK or die "fcntl: $!\n";
}

# Calls $callback once at this time. $owner, a job or a port, has one timer.
sub set_timer {
    my ($owner, $when, $callback) = @_;
    $timers{$owner} = [ $when, $callback ];
}

sub clear_timer {
    my ($owner) = @_;
    delete $timers{$owner};
}

# What fails for one job is not to end the others.
sub attempt {
    my ($callback) = @_;
    return 1 if eval { $callback->(); 1 };
    warn "pvisor agent: $@";
    return 0;
}

sub run {
    my $buffer = "\0" x (12 * 64);
    while (1) {
        my $timeout = keys %ports < $port_count ? 20 : -1;
        my $now = %timers ? now() : 0;
        for my $timer (values %timers) {
            my $wait = $timer->[0] > $now ? int(($timer->[0] - $now) * 1000) + 1 : 0;
            $timeout = $wait if $timeout < 0 || $wait < $timeout;
        }
        my $count = syscall(SYS_epoll_wait, $epoll, $buffer, 64, $timeout);
        for my $index (0 .. $count - 1) {
            my ($events, $descriptor) = unpack 'Lq', substr $buffer, 12 * $index, 12;
            my $watched = $watched{$descriptor} or next;
            next if attempt($watched->[0]) || $watched->[1] & EPOLLET;
            syscall(SYS_epoll_ctl, $epoll, 2, $descriptor, 0) if delete $watched{$descriptor};    # or it fails for ever
        }
        $now = %timers ? now() : 0;
        for my $owner (grep { $timers{$_}[0] <= $now } keys %timers) {
            my $timer = delete $timers{$owner} or next;
            attempt($timer->[1]);
        }
        find_ports() if keys %ports < $port_count;
    }
}
