# What commands have left running, listed and ended for hosts that follow none of them any more.

# The process ids of commands and of all that they started.
sub job_pids {
    $cgroups or die "no cgroup for jobs\n";
    return map { split /\n/, read_file("$_/cgroup.procs") } JOBS, map { JOBS . "/$_" } grep { /^job-/ } names_in(JOBS);
}

# Fields `p`, as many as one message takes, and a text when there are more.
sub list_processes {
    my ($now, $room, @fields) = (now(), PAYLOAD - 256);
    for my $pid (sort { $a <=> $b } job_pids()) {
        my ($name, $state, $start) = read_file("/proc/$pid/stat") =~ /\((.*)\) (\S)(?: \S+){18} (\d+)/s or next;
        next if $state eq 'Z';
        my $words = substr read_file("/proc/$pid/cmdline"), 0, 1024;
        $words = "[$name]" unless length $words;
        my $followed = $jobs{$pid} && $jobs{$pid}{port} ? 1 : 0;
        my $age = int($now * 1000 - $start * 10);    # 100 ticks a second
        my $field = pack 'N C Q> a*', $pid, $followed, $age > 0 ? $age : 0, $words;
        $room -= 5 + length $field;
        return (@fields, 'f', 'there are more') if $room < 0;
        push @fields, 'p', $field;
    }
    return @fields;
}

sub kill_process {
    my %field = @_;
    my ($pid, $signal) = map { is_id($field{$_}) ? $field{$_} + 0 : die "field $_ is no number\n" } qw(p s);
    grep { $_ == $pid } job_pids() or die "no command, and nothing that one has started, has the process id $pid\n";
    return if $jobs{$pid} && kill $signal, -$pid;
    kill $signal, $pid or die "kill: $!\n";
    return;
}
