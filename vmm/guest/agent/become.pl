# What a new process does before it is the program that was asked for.

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
    die "'$arguments->[0]': $!\n";
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
