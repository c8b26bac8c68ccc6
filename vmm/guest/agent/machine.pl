# What changes the machine: held jobs, identity, power.

# Jobs that start processes without end are still listed and ended: this process runs before theirs, and they take not
# all process ids. A guest whose kernel can not do that does without.
sub keep_reach {
    my $priority = pack 'i', 1;
    syscall(SYS_sched_setscheduler, 0, REAL_TIME, $priority);
    my ($ids) = sort { $a <=> $b } map { read_file("/proc/sys/kernel/$_") || 0 } 'threads-max', 'pid_max';
    return if $ids <= 2 * SPARE_IDS;
    write_file(CGROUP . '/cgroup.subtree_control', '+pids') && write_file(JOBS . '/pids.max', $ids - SPARE_IDS);
}

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
