# How the C is compiled: the Makefile includes this file, native/build.py reads it. One `NAME := words` a line.
ENGINE_FOLDERS := engine group plan protocol congestion wire os kernels
C_FLAGS := -std=c11 -D_GNU_SOURCE -g -pthread -Inative/include -Inative -Wall -Wextra -Wshadow -Wconversion -ffp-contract=off
C_LIBS := -pthread -lrt -lm -ldl
