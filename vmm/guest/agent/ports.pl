# Ports, the sessions on them, and what a host asks in one.

sub find_ports {
    for my $device (names_in('/sys/class/virtio-ports')) {
        my $name = read_file("/sys/class/virtio-ports/$device/name");
        chomp $name;
        next unless $name =~ /^pvisor\.agent\./ && !$ports{$name};
        sysopen my $file, "/dev/$device", O_RDWR | O_NONBLOCK or next;
        add_port($name, $file);
    }
}

sub add_port {
    my ($name, $file) = @_;
    my $port = { name => $name, file => $file, in => '', out => [], out_bytes => 0, sent => 0, hunting => 1,
        host_nonce => "\0" x 8 };
    $ports{$name} = $port;
    # Level-triggered, a port without a host would always be ready: its hang-up stays.
    watch($file, EPOLLIN | EPOLLOUT | EPOLLET, sub { read_port($port); flush_port($port) });
    reply($port, 'BEGUN', '');    # to a host in a session with an agent that was killed, who would wait for ever
}

# The end of the stream means that no host is connected. The kernel learns of hosts that go and come apart from their
# bytes, so the next one's may be here before the last one's end: only an end that lasts is one, then $lasting is true.
sub read_port {
    my ($port, $lasting) = @_;
    while (1) {
        my $count = sysread $port->{file}, $port->{in}, 32768, length $port->{in};
        if (!defined $count) {
            next if $! == EINTR;
            hang_up($port) if $! != EAGAIN;
            return;
        }
        if ($count == 0) {
            if ($lasting || $port->{alone}) {
                hang_up($port);
            } elsif (!$port->{hunting}) {
                set_timer($port, now() + HANG_UP_AFTER, sub { read_port($port, 1) });
            }
            return;
        }
        $lasting = 0;
        parse($port);
    }
}

sub parse {
    my ($port) = @_;
    while (1) {
        if ($port->{hunting}) {
            my $at = index $port->{in}, HELLO;
            if ($at < 0) {
                my $excess = length($port->{in}) - length(HELLO) + 1;
                substr $port->{in}, 0, $excess, '' if $excess > 0;
                return;
            }
            substr $port->{in}, 0, $at, '';
            return if length $port->{in} < GREETING;
            my ($version, $nonce, $again) = unpack 'x16 n x6 a8 a8', $port->{in};
            if ($nonce ne $again) {    # a greeting that was cut off
                substr $port->{in}, 0, 1, '';
                next;
            }
            substr $port->{in}, 0, GREETING, '';
            $port->{hunting} = 0;
            begin_session($port, $nonce);
            next;
        }
        return if length $port->{in} < 4;
        my ($kind, $zero, $length) = unpack 'C C n', $port->{in};
        if ($kind == 0 || $zero != 0 || $length > PAYLOAD) {
            $port->{hunting} = 1;
            next;
        }
        return if length $port->{in} < $length + 12;
        if (substr($port->{in}, 4 + $length, 8) ne $port->{agent_nonce}) {
            $port->{hunting} = 1;
            next;
        }
        my $payload = substr $port->{in}, 4, $length;
        substr $port->{in}, 0, $length + 12, '';
        handle($port, $kind, $payload);
    }
}

sub begin_session {
    my ($port, $nonce) = @_;
    if (!$port->{fresh} || $port->{host_nonce} ne $nonce) {    # else the host has only asked again
        end_session($port);
        my $random = "\0" x 8;
        syscall(SYS_getrandom, $random, 8, 0) == 8 or die "getrandom: $!\n";
        @$port{qw(host_nonce agent_nonce fresh)} = ($nonce, $random, 1);
    }
    put($port, pack 'a16 n x6 a8 a8', WELCOME, VERSION, $port->{agent_nonce}, $nonce);
}

sub hang_up {
    my ($port) = @_;
    end_session($port);
    @$port{qw(in hunting)} = ('', 1);
    exit if $port->{alone};
}

# The job goes on alone; what of its stdin has come is still given to it.
sub end_session {
    my ($port) = @_;
    @$port{qw(out out_bytes sent request fresh)} = ([], 0, 0, '', 0);
    my $job = delete $port->{job} or return;
    delete $job->{port};
    return read_no_more($job, 'STDOUT') if $job->{terminal};
    resume_output($job);
    give_stdin($job, '');
}

sub reply {
    my ($port, $kind, $payload) = @_;
    put($port, pack('C x n', $KIND{$kind}, length $payload) . $payload . $port->{host_nonce});
}

sub put {
    my ($port, $bytes) = @_;
    push @{ $port->{out} }, $bytes;
    $port->{out_bytes} += length $bytes;
    flush_port($port);
}

sub flush_port {
    my ($port) = @_;
    while (my $bytes = $port->{out}[0]) {
        my $count = syswrite $port->{file}, $bytes, length($bytes) - $port->{sent}, $port->{sent};
        if (!defined $count) {
            next if $! == EINTR;
            last;    # EAGAIN: the port is watched. Others: reading it says that the host is gone
        }
        $port->{sent} += $count;
        next if $port->{sent} < length $bytes;
        shift @{ $port->{out} };
        $port->{sent} = 0;
        $port->{out_bytes} -= length $bytes;
    }
    resume_output($port->{job}) if $port->{job} && $port->{out_bytes} < OUTGOING_HIGH;
}

sub handle {
    my ($port, $kind, $payload) = @_;
    my $job = $port->{job};
    $port->{fresh} = 0;
    if ($kind == $KIND{PING}) {
        reply($port, 'PONG', $payload);
    } elsif ($kind == $KIND{PART}) {
        return refuse($port, 125, 'the request is too long') if length($port->{request}) > REQUEST_MAX;
        $port->{request} .= $payload;
    } elsif ($kind == $KIND{EXECUTE}) {
        my $request = delete($port->{request}) . $payload;
        $port->{request} = '';
        return refuse($port, 125, 'a process of this session runs already') if $job;
        eval { start_job($port, unpack '(a N/a*)*', $request); 1 } or refuse($port, 125, $@);
    } elsif ($kind == $KIND{STDIN}) {
        give_stdin($job, $payload) if $job;
    } elsif ($kind == $KIND{SIGNAL}) {
        signal_job($job, unpack 'C', $payload) if $job;
    } elsif ($kind == $KIND{WINDOW}) {
        set_window($job->{terminal}, $payload) if $job && $job->{terminal};
    } elsif ($kind == $KIND{CLOSE}) {
        read_no_more($job, $payload eq "\1" ? 'STDOUT' : 'STDERR') if $job;
    } elsif ($kind >= $KIND{IDENTIFY} && $kind <= $KIND{KILL}) {
        return refuse($port, 125, 'this agent was started without --machine') unless $machine;
        my @fields = eval {
            return list_processes() if $kind == $KIND{LIST};
            return kill_process(unpack '(a N/a*)*', $payload) if $kind == $KIND{KILL};
            map { ('f', $_) } $kind == $KIND{HOLD} ? hold()
                : $kind == $KIND{SHUTDOWN} ? shut_down()
                : identify(unpack '(a N/a*)*', $payload);
        };
        return refuse($port, 125, $@) if $@;
        reply($port, 'DONE', pack '(a N/a*)*', @fields);
    } else {
        refuse($port, 125, "message $kind is not known here");
    }
}

sub refuse {
    my ($port, $code, $text) = @_;
    chomp $text;
    reply($port, 'REFUSED', pack('C', $code) . substr $text, 0, 4096);
}
