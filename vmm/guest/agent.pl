#!/usr/bin/perl
# pVisor's agent in a guest: runs processes for the host and gives the guest its identity.
#
#   agent.pl [--machine] [--root DIR] [--ports COUNT] [fd:N...]
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
    HOLD => 10, PONG => 0x41, STARTED => 0x42, STDOUT => 0x43, STDERR => 0x44, CREDIT => 0x45, ENDED => 0x46, REFUSED => 0x47,
    DONE => 0x48,
);

sub OUTGOING_HIGH() { 65536 }    # bytes queued for a port that make its job's output wait
sub HANG_UP_AFTER() { 0.1 }      # seconds without a host that end a session
sub KILL_AFTER()    { 2 }        # seconds from SIGTERM to SIGKILL at a timeout
sub GRACE()         { 0.1 }      # seconds that output of a job's remaining processes is waited for
sub STILL_WITHIN()  { 1 }        # seconds that processes are given to stand still
sub HOLD_AT_MOST()  { 5 }        # seconds after which held jobs go on by themselves
sub PATH()          { '/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' }

my ($machine, $root, $port_count) = (0, '/', 0);
my (%ports, %jobs, %watched, %timers);    # by name, by process id, by descriptor, by owner
my $job_number = 0;
my ($epoll, $cgroups);

# ---- waiting

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

# ---- ports and sessions

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
    my $port = { name => $name, file => $file, in => '', out => [], out_bytes => 0, sent => 0, hunting => 1 };
    $ports{$name} = $port;
    # Level-triggered, a port without a host would always be ready: its hang-up stays.
    watch($file, EPOLLIN | EPOLLOUT | EPOLLET, sub { read_port($port); flush_port($port) });
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
    } elsif ($kind == $KIND{IDENTIFY} || $kind == $KIND{HOLD} || $kind == $KIND{SHUTDOWN}) {
        return refuse($port, 125, 'this agent was started without --machine') unless $machine;
        my @harmless = eval {
            return $kind == $KIND{HOLD} ? hold() : shut_down() if $kind != $KIND{IDENTIFY};
            identify(unpack '(a N/a*)*', $payload);
        };
        return refuse($port, 125, $@) if $@;
        reply($port, 'DONE', pack '(a N/a*)*', map { ('f', $_) } @harmless);
    } else {
        refuse($port, 125, "message $kind is not known here");
    }
}

sub refuse {
    my ($port, $code, $text) = @_;
    chomp $text;
    reply($port, 'REFUSED', pack('C', $code) . substr $text, 0, 4096);
}

# ---- jobs

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

# In the new process: ends with exec, or dies, with a shell's exit code for that when exec failed.
sub become {
    my ($job, $inner, $arguments, $environment, $option, $code) = @_;
    $SIG{$_} = 'DEFAULT' for qw(PIPE TERM HUP INT QUIT);
    my $no_signals = pack 'Q', 0;
    syscall(SYS_rt_sigprocmask, 2, $no_signals, 0, 8) == 0 or die "rt_sigprocmask: $!\n";
    syscall(SYS_setsid);
    if ($machine) {
        write_file('/proc/self/oom_score_adj', '0');
        my $open_files = pack 'QQ', 1024, 524288;    # as systemd has it
        syscall(SYS_setrlimit, 7, $open_files) == 0 or die "setrlimit: $!\n";
    }
    syscall(SYS_dup2, fileno $inner->[$_], $_) == $_ or die "dup2: $!\n" for 0 .. 2;
    ioctl STDIN, TIOCSCTTY, 0 or die "terminal: $!\n" if $job->{terminal};
    if ($root ne '/') {
        chroot $root or die "$root: $!\n";
    }
    my $directory = length($option->{d} // '') ? $option->{d} : '/';
    umask 022;
    chdir $directory or make_directory($directory) && chdir $directory or die "working directory $directory: $!\n";
    my ($uid, $gid, $groups, $user_home) = credentials($option->{u} // '');
    for my $stream ($uid ? (\*STDIN, \*STDOUT, \*STDERR) : ()) {
        next unless -p $stream || -t $stream;
        chown $uid, -1, $stream or die "chown: $!\n";    # so that it can open /dev/stdout
    }
    my $group_list = pack 'L*', @$groups;
    syscall(SYS_setgroups, scalar @$groups, $group_list) == 0 or die "setgroups: $!\n";
    syscall(SYS_setresgid, $gid, $gid, $gid) == 0 or die "setresgid: $!\n";
    syscall(SYS_setresuid, $uid, $uid, $uid) == 0 or die "setresuid: $!\n";
    %ENV = (PATH => PATH, HOME => $user_home, %$environment);
    no warnings 'exec';
    exec { $arguments->[0] } @$arguments;
    $$code = $! == ENOENT ? 127 : 126;
    die "$arguments->[0]: $!\n";
}

# With those above it; false, with $!, when that can not be.
sub make_directory {
    my ($path) = @_;
    my $made = '';
    for my $name (grep { length } split m{/}, $path) {
        $made .= "/$name";
        mkdir $made, 0755 or $! == EEXIST or return 0;
    }
    return 1;
}

# Who that is by the guest's own files, as container engines take it.
sub credentials {
    my ($user) = @_;
    my ($name, $group) = split /:/, $user, 2;
    $name = '0' unless length($name // '');
    my @users = rows('/etc/passwd');
    my ($entry) = grep { $_->[0] eq $name } @users;
    ($entry) = grep { $_->[2] == $name } @users if !$entry && is_id($name);
    die "user $name is not in the guest's /etc/passwd\n" unless $entry || is_id($name);
    my $uid = $entry ? $entry->[2] : $name;
    my $gid = $entry && is_id($entry->[3]) ? $entry->[3] : 0;
    my $user_home = $entry && length($entry->[5] // '') ? $entry->[5] : '/';
    if (length($group // '')) {
        my ($row) = grep { $_->[0] eq $group } rows('/etc/group');
        die "group $group is not in the guest's /etc/group\n" unless $row || is_id($group);
        return ($uid + 0, ($row ? $row->[2] : $group) + 0, [], $user_home);
    }
    my @groups;
    for my $row ($entry ? rows('/etc/group') : ()) {
        push @groups, $row->[2] if grep { $_ eq $entry->[0] } split /,/, $row->[3] // '';
    }
    return ($uid + 0, $gid + 0, \@groups, $user_home);    # numbers: syscall() takes text for an address
}

sub rows {
    my ($path) = @_;
    my @rows = map { [ split /:/ ] } split /\n/, read_file($path);
    return grep { @$_ > 2 && $_->[0] !~ /^[#+-]/ && is_id($_->[2]) } @rows;
}

sub is_id {
    my ($text) = @_;
    return defined $text && $text =~ /^[0-9]{1,10}\z/ && $text < 0xFFFFFFFF;
}

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

# ---- the machine

# Holds the jobs still until `release`. Returns texts of what failed and does no harm.
sub hold {
    $cgroups or die "no cgroup for jobs\n";
    set_timer('held', now() + HOLD_AT_MOST, \&release_alone);
    write_file(JOBS . '/cgroup.freeze', '1') or die "cgroup.freeze: $!\n";
    sysopen my $events, JOBS . '/cgroup.events', O_RDONLY or die "cgroup.events: $!\n";
    my $until = now() + STILL_WITHIN;
    while (1) {
        sysseek $events, 0, 0;
        sysread $events, my $text, 4096;
        return if $text =~ /^frozen 1/m;
        my $left = $until - now();
        return 'some processes did not stand still in ' . STILL_WITHIN . ' s' if $left <= 0;
        my $changed = '';
        vec($changed, fileno $events, 1) = 1;
        select undef, undef, $changed, $left;
    }
}

sub release {
    write_file(JOBS . '/cgroup.freeze', '0') or die "cgroup.freeze: $!\n";
    clear_timer('held');
}

# Nobody has said who this guest is now. It may be one of several all the same: the kernel is to ask the processor for
# random numbers before a job asks the kernel.
sub release_alone {
    set_timer('held', now() + 1, \&release_alone);    # again, should this fail
    if (sysopen my $random, '/dev/urandom', O_RDWR) {
        ioctl $random, RNDRESEEDCRNG, 0;
    }
    release();
}

# Returns texts of what failed and does no harm.
sub identify {
    my %field = @_;
    if (defined $field{r}) {
        sysopen my $random, '/dev/urandom', O_RDWR or die "/dev/urandom: $!\n";
        my $length = length $field{r};
        ioctl $random, RNDADDENTROPY, pack 'iia*', 8 * $length, $length, $field{r} or die "RNDADDENTROPY: $!\n";
        ioctl $random, RNDRESEEDCRNG, 0 or die "RNDRESEEDCRNG: $!\n";
    }
    if (defined $field{h}) {
        syscall(SYS_sethostname, $field{h}, length $field{h}) == 0 or die "sethostname: $!\n";
    }
    set_address($field{n}) if defined $field{n};
    my @harmless;
    in_root(sub {
        my %file;
        $file{'/etc/hostname'} = "$field{h}\n" if defined $field{h};
        $file{'/etc/machine-id'} = "$field{m}\n" if defined $field{m};
        $file{'/var/lib/dbus/machine-id'} = "$field{m}\n"
            if defined $field{m} && -f '/var/lib/dbus/machine-id' && !-l '/var/lib/dbus/machine-id';
        for my $path (sort keys %file) {
            eval { replace_file($path, $file{$path}); 1 } or push @harmless, $@ =~ s/\n\z//r;
        }
    }) if defined $field{h} || defined $field{m};
    if (defined $field{c}) {    # late: nothing comes between the host's clock and this
        my $time = pack 'qq', unpack 'Q>2', $field{c};
        syscall(SYS_clock_settime, CLOCK_REALTIME, $time) == 0 or die "clock_settime: $!\n";
    }
    release() if $timers{held};
    return @harmless;
}

sub set_address {
    my ($address) = @_;
    my @interfaces = grep { $_ ne 'lo' } names_in('/sys/class/net');
    my ($interface) = ((grep { $_ eq 'eth0' } @interfaces), sort @interfaces);
    defined $interface or die "no network interface\n";
    socket my $socket, 2, 2, 0 or die "socket: $!\n";    # AF_INET, SOCK_DGRAM
    ioctl $socket, SIOCSIFHWADDR, pack 'a16 S a14', $interface, 1, $address or die "address of $interface: $!\n";
}

# Calls it with the workload's root as this process's own, so that links in there lead where the workload sees them lead.
sub in_root {
    my ($code) = @_;
    return $code->() if $root eq '/';
    opendir my $outside, '/' or die "/: $!\n";
    chroot $root or die "$root: $!\n";
    chdir '/';
    my $done = eval { $code->(); 1 };
    my $error = $@;
    chdir $outside or die "fchdir: $!\n";
    chroot '.' or die "chroot: $!\n";
    die $error unless $done;
}

# Never through a link or into a device that the workload has put there. A plain file is written to, which spares the
# guest the pages of another one; anything else is replaced in one step.
sub replace_file {
    my ($path, $text) = @_;
    if (lstat $path and -f _ and sysopen my $old, $path, O_OLD) {
        return if -f $old && (stat _)[3] == 1    # no other name has it
            && (syswrite($old, $text) // -1) == length $text && truncate $old, length $text;
    }
    my $new = "$path.pvisor";
    unlink $new;
    sysopen my $file, $new, O_NEW, 0644 or die "$path: $!\n";
    my $count = syswrite $file, $text;
    if (!defined $count || $count != length $text || !rename $new, $path) {
        my $reason = "$path: $!\n";
        unlink $new;
        die $reason;
    }
}

# Busybox's init takes this for "power off": it ends all processes, unmounts the disks, and ends the machine.
sub shut_down {
    syscall(SYS_sync);
    kill 'USR2', 1 or die "init: $!\n";
    return;
}

# ---- files

# Nothing when there is no such file, and never waits.
sub read_file {
    my ($path) = @_;
    sysopen my $file, $path, O_RDONLY | O_NONBLOCK or return '';
    my $text = '';
    while (sysread $file, $text, 65536, length $text) { }
    return $text;
}

sub write_file {
    my ($path, $text) = @_;
    open my $file, '>', $path or return 0;
    return defined syswrite $file, $text;
}

sub names_in {
    my ($path) = @_;
    opendir my $directory, $path or return ();
    return grep { !/^\.\.?$/ } readdir $directory;
}

# ---- start

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
