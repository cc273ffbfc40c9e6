"""`python -m expertctl` is the same as `expertctl`."""

from expertctl.app import main

if __name__ == "__main__":
    main()
