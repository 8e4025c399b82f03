# Turns a list of entry points into C: `name [out...]`, where an out is a letter and the index of an
# argument to write: h a dummy handle, i a 32-bit zero, z a 64-bit zero.
# With -v status=N they return N instead of 0.
# With -v unknown=LIBRARY every entry point reports itself and answers "not supported" instead.
# All are weak: a definition by hand wins.
BEGIN { print "#include \"stubs.h\"" }
/^[A-Za-z_]/ {
    if (unknown != "") {
        printf "UNKNOWN(%s, \"%s\")\n", $1, unknown
    } else if (NF == 1) {
        printf "ANSWER(%s, %d)\n", $1, status
    } else {
        most = 0
        for (i = 2; i <= NF; i++) {
            index_ = substr($i, 2) + 0
            most = index_ > most ? index_ : most
        }
        printf "BEGIN_OUT(%s)(", $1
        for (i = 0; i <= most; i++) {
            printf "%suintptr_t a%d", i == 0 ? "" : ", ", i
        }
        printf ") {\n    COUNT();\n"
        for (i = 0; i < most; i++) {
            printf "    (void)a%d;\n", i
        }
        for (i = 2; i <= NF; i++) {
            printf "    pya_hc_stub_write_%s(a%s);\n", substr($i, 1, 1), substr($i, 2)
        }
        print "    return 0;\n}"
    }
}
