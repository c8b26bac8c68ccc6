# Small files.

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
